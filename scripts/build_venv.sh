#!/usr/bin/env bash
# Build the virtual environment from the pins, unless it is already there and they have not changed.
#
#   scripts/build_venv.sh PYTHON FOLDER
#
# The stamp, written last, holds a hash of the pins and of the installed commands, and the Python version. A folder
# without one was left unfinished.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
venv=$2

fail() {
  echo "error: $*" >&2
  exit 1
}

version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null) ||
  fail "'$python' is not a Python that runs. Install Python 3.11, or name one: make PYTHON=/path/to/python3.11 ..."
case $version in
  3.11.*) ;;
  *) fail "'$python' is Python $version, and the pins in requirements/ are for 3.11. Name one: make PYTHON=python3.11 ..." ;;
esac

stamp="$({
  grep -hv "^#" requirements/torch.txt requirements/cpu.txt
  sed -n '/^\[project.scripts\]/,/^$/p' pyproject.toml
} | sha256sum | cut -c -64) python $version"
if [ -f "$venv/pins.stamp" ]; then
  if [ "$(cat "$venv/pins.stamp")" = "$stamp" ] && [ -x "$venv/bin/python" ]; then
    exit 0
  fi
  echo "==> The pins, the commands or the Python changed: building $venv anew"
elif [ -e "$venv" ]; then
  echo "==> $venv was left unfinished: building it anew"
fi

echo "==> Creating $venv with Python $version"
rm -rf "$venv"
"$python" -m venv "$venv" || fail "Python $version cannot create virtual environments. On Debian: apt install python3.11-venv"
pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input install -qq "$@" ||
    fail "pip could not install $1 $2 $3 (see above). Run the same command again to start over."
}
echo "==> Installing torch (requirements/torch.txt)"
pip -r requirements/torch.txt --progress-bar=off
echo "==> Installing $(grep -c == requirements/cpu.txt) pinned packages (requirements/cpu.txt): a few minutes"
pip --no-deps -r requirements/cpu.txt
echo "==> Installing this package, editable"
pip --no-deps --no-build-isolation -e .
echo "$stamp" >"$venv/pins.stamp"
