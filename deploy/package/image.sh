# The container image. Sourced by package.sh.

step "image"
root=$work/image/root
install -D -t "$root/usr/local/bin" "${products[@]/#/$work/bin/}"
# The loader stands at the path that the binaries name; it finds the libraries in /usr/lib.
ldd "${products[@]/#/$work/bin/}" | sed -n 's|.*=> \(/[^ ]*\) (.*|\1|p' | sort -u |
  xargs install -D -t "$root/usr/lib"
loader=$(readelf --wide --program-headers "$work/bin/warmroute-router" |
  sed -n 's|.*interpreter: \(/.*\)\]|\1|p')
install -D "$loader" "$root$loader"
install -D -m 644 -t "$root/etc/ssl/certs" /etc/ssl/certs/ca-certificates.crt
echo "warmroute:x:10001:10001::/nonexistent:/sbin/nologin" >"$root/etc/passwd"
echo "warmroute:x:10001:" >"$root/etc/group"
echo "hosts: files dns" >"$root/etc/nsswitch.conf"
mkdir -p "$work/image/state" "$root"/{dev,proc,sys,tmp,var/lib}
chmod 1777 "$root/tmp"

image=warmroute:$version
archive=$dist/$name-image.tar
buildah "${storage[@]}" build --quiet --isolation chroot --timestamp "$SOURCE_DATE_EPOCH" \
  --label "org.opencontainers.image.version=$version" \
  --label "org.opencontainers.image.revision=${BUILD_COMMIT:-unknown}" \
  --file deploy/package/Containerfile --tag "$image" "$work/image" >/dev/null
buildah "${storage[@]}" push --quiet "$image" "oci-archive:$archive:$image"
gzip -n "$archive"

# Tried from the archive, in a root directory that is mounted read-only.
began=$SECONDS
gunzip -c "$archive.gz" >"$work/tried.tar"
container=$(buildah "${storage[@]}" from --quiet "oci-archive:$work/tried.tar")
[ "$(buildah "${storage[@]}" inspect --format '{{.OCIv1.Config.User}}' "$container")" = 10001:10001 ]
for binary in "${products[@]}"; do
  is_version "$binary" buildah "${storage[@]}" run --isolation chroot "$container" --
done
mounted=$(buildah "${storage[@]}" mount "$container")
[ ! -e "$mounted/usr/local/bin/warmroute-mock-engine" ] || fail "the image has the mock engine"
writable=$(find "$mounted" -xdev ! -type l ! -path '*/tmp' \( -user 10001 -o -perm -o=w \) -printf '/%P\n')
[ "$writable" = /var/lib/warmroute ] || fail "writable in the image: $writable"
loaded=$((SECONDS - began))
began=$SECONDS
unshare --mount deploy/package/try_image.sh "$mounted"
echo "image path: $loaded s to unpack and check, $((SECONDS - began)) s to an answer of its router"
