# The tarball, laid out for /usr/local. Sourced by package.sh.

step "tarball"
tree=$work/tarball/$name
share=$tree/share
install -D -t "$tree/bin" "$work/bin"/*
install -D -m 644 -t "$tree/lib/systemd/system" deploy/systemd/*.service
# A drop-in among the units would apply to routers without NATS.
install -D -m 644 -t "$share/doc/warmroute/warmroute-router.service.d" \
  deploy/systemd/warmroute-router.service.d/*.conf
install -D -m 644 -t "$share/man/man1" "$work/manual/man"/*.1
install -D -m 644 -t "$share/zsh/site-functions" "$work/manual/completions/zsh"/*
install -D -m 644 -t "$share/fish/vendor_completions.d" "$work/manual/completions/fish"/*
for file in "$work/manual/completions/bash"/*.bash; do
  install -D -m 644 "$file" "$share/bash-completion/completions/$(basename "$file" .bash)"
done
install -D -m 644 -t "$share/doc/warmroute" README.md LICENSE CHANGELOG.md deploy/router.toml \
  deploy/nats/nats.conf deploy/nats/nats-core.conf deploy/prometheus/rules.yml "$bill"
(cd "$tree" && find . -type f ! -name SHA256SUMS -printf '%P\0' | sort -z | xargs -0 sha256sum) \
  >"$work/sums"
install -m 644 "$work/sums" "$share/doc/warmroute/SHA256SUMS"
tarball=$dist/$name.tar.gz
tar -C "$work/tarball" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 \
  --numeric-owner -cf - "$name" | gzip -n >"$tarball"

prefix=$work/prefix
mkdir "$prefix"
tar -C "$prefix" --strip-components=1 -xf "$tarball"
(cd "$prefix" && sha256sum --quiet -c share/doc/warmroute/SHA256SUMS)
for binary in "${packaged[@]}"; do
  is_version "$prefix/bin/$binary"
  grep -q '^\.TH' "$prefix/share/man/man1/$binary.1"
  grep -q "complete -F .* $binary\$" "$prefix/share/bash-completion/completions/$binary"
  grep -q "^#compdef $binary\$" "$prefix/share/zsh/site-functions/_$binary"
  grep -q "^complete -c $binary " "$prefix/share/fish/vendor_completions.d/$binary.fish"
  bash -n "$prefix/share/bash-completion/completions/$binary"
done
# As check.sh, with the binaries of the tarball.
units=$work/units
mkdir "$units"
for unit in "$prefix/lib/systemd/system"/*.service; do
  sed "s|^ExecStart=/usr/local/|ExecStart=$prefix/|" "$unit" \
    >"$units/$(basename "${unit/@/@check}")"
done
cp -r "$prefix/share/doc/warmroute/warmroute-router.service.d" "$units"
systemd-analyze verify --man=no "$units"/*.service
# As the unit starts it: its command with the guide's environment, where the model is another one,
# on free ports.
mapfile -t environment < <(sed -n "/^cat >.*\/router.env <<'END'/,/^END$/p" docs/GETTING_STARTED.md |
  sed "1d;\$d;s|/models/MODEL|$PWD/tests/fixtures/tiny|")
read -ra started < <(sed -n 's/^ExecStart=//p' "$units/warmroute-router.service")
[ "${#environment[@]}" = 2 ] || fail "no router.env in docs/GETTING_STARTED.md"
deploy/package/try_router.sh env --ignore-environment "${environment[@]}" \
  WARMROUTE_PORT=0 WARMROUTE_ADMIN_PORT=0 "${started[@]}"
