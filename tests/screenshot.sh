#!/usr/bin/env bash
# Makes docs/live-page.png, the README's picture: the live page of a fleet under load, in minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

need_command chromium chromium
need_command chromedriver chromium-driver
need_command pngquant pngquant
need_nats_server
cargo test --locked --package warmroute-tests --test e2e -- --ignored --exact live_page::picture
pngquant --force --ext .png 64 docs/live-page.png
