#!/usr/bin/env bash
# try_image.sh ROOT: tries the router of an image's root directory as its user, with that directory
# read-only. In a mount namespace of its own.
set -euo pipefail
root=$1

mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
if touch "$root/tmp/written" 2>/dev/null; then
  echo "the root directory is not read-only" >&2
  exit 1
fi
exec "$(dirname "$0")/try_router.sh" env --ignore-environment PATH=/usr/local/bin \
  "$(command -v chroot)" --userspec=10001:10001 "$root" \
  /usr/local/bin/warmroute-router --host 127.0.0.1 --port 0 --admin-port 0 \
  --worker http://127.0.0.1:1,id=absent
