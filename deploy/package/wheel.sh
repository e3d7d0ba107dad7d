# The Python wheel. Sourced by package.sh.

step "wheel"
wheel=$(python3 deploy/package/wheel.py "$version" "$work/bin" "$work/$library" "$bill" "$dist")
echo "$(basename "$wheel")"
# A debug build has the tag of this machine's glibc.
minor=$(sed -n 's/.*-manylinux_2_\([0-9]*\)_.*/\1/p' <<<"$wheel")
[ "$profile" != release ] || [ "${minor:-99}" -le 28 ] ||
  fail "the wheel needs a newer glibc than manylinux_2_28: $(basename "$wheel")"
# The guide's path with pip.
began=$SECONDS
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-index "$wheel"
installed=$((SECONDS - began))
for binary in "${packaged[@]}"; do
  is_version "$work/venv/bin/$binary"
done
"$work/venv/bin/python" -c 'from warmroute import Publisher; Publisher("tcp://127.0.0.1:*", block_size=16).cleared()'
began=$SECONDS
./quickstart.sh --once --binaries "$work/venv/bin"
echo "pip path: $installed s to install, $((SECONDS - began)) s for the quick start"
"$work/venv/bin/pip" uninstall --quiet --yes --disable-pip-version-check warmroute
[ ! -e "$work/venv/bin/warmroute-router" ] || fail "the wheel's record misses its binaries"
