#!/usr/bin/env bash
# Checks the files of deploy/ with the installed tools. A missing tool is a failure, unless
# `--allow-skips NAME,NAME` names what it would check.
set -euo pipefail
cd "$(dirname "$0")"

allowed=
case "${1:-}" in
  "") ;;
  --allow-skips) allowed=${2:?--allow-skips needs names} ;;
  *) echo "unknown argument: $1" >&2; exit 2 ;;
esac
unchecked=0

passed() { echo "$1: ok"; }
skipped() {
  echo "$1: not checked, there is no $2 here"
  [[ ",$allowed," == *",$1,"* ]] || unchecked=1
}

if docker compose version >/dev/null 2>&1; then
  for profile in mock vllm; do
    docker compose --file compose.yaml --profile "$profile" config --quiet
  done
  passed compose.yaml
else
  skipped compose.yaml "docker compose"
fi

if command -v haproxy >/dev/null 2>&1; then
  haproxy -c -q -f haproxy/haproxy.cfg
  passed haproxy.cfg
else
  skipped haproxy.cfg haproxy
fi

if command -v nginx >/dev/null 2>&1; then
  # Unchanged: the routers' name need not resolve here.
  nginx -t -q -c "$PWD/nginx/nginx.conf"
  passed nginx.conf
else
  skipped nginx.conf nginx
fi

if command -v kubectl >/dev/null 2>&1; then
  made=$(kubectl kustomize kubernetes)
  # Each worker pod has its own credential, named like the users of nats.conf.
  grep -q 'subPathExpr: shim-$(POD_NAME)' <<<"$made"
  grep -q '^  serviceName: worker$' <<<"$made"
  for pod in worker-0 worker-1; do
    grep -q "user: shim-$pod," nats/nats.conf
  done
  # The name that nginx resolves.
  grep -q '^  name: routers$' <<<"$made"
  grep -q 'set \$routers routers:8080;' nginx/nginx.conf
  passed kubernetes
else
  skipped kubernetes kubectl
fi

if command -v systemd-analyze >/dev/null 2>&1; then
  units=$(mktemp -d)
  trap 'rm -rf "$units"' EXIT
  for unit in systemd/*.service; do
    # The binaries are not installed here.
    sed 's|^ExecStart=.*|ExecStart=/bin/true|' "$unit" >"$units/$(basename "${unit/@/@check}")"
  done
  cp -r systemd/*.d "$units"
  systemd-analyze verify --man=no "$units"/*.service
  passed systemd
else
  skipped systemd systemd-analyze
fi

if [ "$unchecked" = 1 ]; then
  echo "not everything was checked; --allow-skips NAME,NAME permits that" >&2
  exit 1
fi
