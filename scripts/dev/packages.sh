# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# Programs that the project needs. If all are present, nothing happens and no package list is
# fetched. Missing ones are installed from Debian's packages, without starting or enabling any
# system service.

# ensure_packages GROUP...: installs the missing packages of `servers`, `client`, `sandbox`,
# `clocks`, `compiler`, `guest`, `python`, `npm`.
ensure_packages() {
  local group
  local -a missing=()
  for group in "$@"; do
    case $group in
      servers)
        have nats-server || missing+=(nats-server)
        postgres_bin_find >/dev/null || missing+=(postgresql)
        ;;
      client) have curl || missing+=(curl) ;;
      sandbox) have bwrap || missing+=(bubblewrap) ;;
      # With CONSTRUCT_TEST_CLOCKS=off no clock jumps in the tests, which report it.
      clocks) [[ ${CONSTRUCT_TEST_CLOCKS:-} == off ]] || packages_have_faketime || missing+=(libfaketime) ;;
      compiler) have cc || missing+=(gcc libc6-dev) ;;
      python) python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv) ;;
      npm) have npm || missing+=(npm) ;;
      guest) have clang-19 || missing+=(clang-19) ;;
      *) die "unknown package group '$group'" ;;
    esac
  done
  if ((${#missing[@]} == 0)); then return 0; fi
  have apt-get || die "missing: ${missing[*]}. This is not a Debian system: install them with its package manager, and try again"
  if ((EUID != 0)) && ! have sudo; then
    die "missing: ${missing[*]}. Install them as root: apt-get install --no-install-recommends ${missing[*]}"
  fi
  timed "installing ${missing[*]}" packages_install "${missing[@]}"
}

packages_have_faketime() { [[ -e ${CONSTRUCT_TEST_FAKETIME:-} ]] || compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1' >/dev/null; }

have() { command -v -- "$1" >/dev/null 2>&1; }

packages_install() {
  # The script is a child process, so that its clean-up runs at its own end.
  as_root env DEBIAN_FRONTEND=noninteractive bash -euo pipefail -c "$(declare -f packages_apt); packages_apt \"\$@\"" apt "$@" >&2 ||
    die "could not install: $*"
  hash -r
}

# Runs as root. Debian's packages start their servers when installed. The mesh brings its own, so
# nothing may be started, no cluster created, and nothing enabled for the next boot.
packages_apt() {
  local policy=/usr/sbin/policy-rc.d cluster=/etc/postgresql-common/createcluster.d/construct-none.conf
  # Not local: the trap runs after the function has returned.
  made=()
  umask 022
  trap 'if ((${#made[@]} > 0)); then rm -f -- "${made[@]}"; fi' EXIT
  if [[ ! -e $policy ]]; then
    made+=("$policy")
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  if [[ ! -e /usr/bin/pg_createcluster && ! -e $cluster ]]; then
    made+=("$cluster")
    mkdir -p "${cluster%/*}"
    printf 'create_main_cluster = false\n' >"$cluster"
    chmod 644 "$cluster"
  fi
  # Fresh machines have no package lists and old ones stale lists: the lists are fetched only after
  # a failure.
  if ! apt-get install -y --no-install-recommends "$@"; then
    apt-get update
    apt-get install -y --no-install-recommends "$@"
  fi
  if [[ " $* " == *" nats-server "* && -d /run/systemd/system ]]; then
    systemctl disable --quiet nats-server || true
  fi
}

as_root() {
  if ((EUID == 0)); then "$@"; else sudo -- "$@"; fi
}

# Rust must be installed; the workspace has the minimum version.
ensure_rust() {
  local needed found
  needed=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml | head -n 1)
  if ! have cargo || ! have rustc; then
    die "Rust $needed or newer is needed and was not found. Get it from https://rustup.rs: curl https://sh.rustup.rs -sSf | sh"
  fi
  found=$(rustc --version | sed -n 's/^rustc \([0-9]*\.[0-9]*\).*/\1/p')
  if [[ $(printf '%s\n%s\n' "$needed" "$found" | sort -V | head -n 1) != "$needed" ]]; then
    die "Rust $needed or newer is needed, but rustc is $found. With rustup: rustup update stable"
  fi
}
