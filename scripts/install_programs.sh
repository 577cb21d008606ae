#!/usr/bin/env bash
# Install the programs that tests drive and pip does not bring: Chromium and nginx, with apt. Nothing is done on a machine
# that has them.
set -euo pipefail

packages=()
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
  packages+=(chromium)
command -v nginx >/dev/null || packages+=(nginx-light)
[ ${#packages[@]} -gt 0 ] || exit 0

install="apt-get install ${packages[*]}"
if ! command -v apt-get >/dev/null; then
  echo "error: the tests need ${packages[*]}, and there is no apt-get here. Install them and put them on the PATH." >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "error: the tests need ${packages[*]}, and only root can install them. Run as root: $install" >&2
  exit 1
fi
echo "==> $install"
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${packages[@]}" >/dev/null
