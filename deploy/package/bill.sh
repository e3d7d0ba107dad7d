# The bill of materials. Sourced by package.sh.

step "bill of materials"
rm -rf "$dist"
mkdir -p "$dist"
bill=$dist/warmroute-$version.cdx.json
python3 deploy/package/sbom.py "$triple" "$(IFS=,; echo "${packaged[*]},warmroute-publisher")" "$bill"
.venv/bin/python deploy/package/check_sbom.py "$bill"
