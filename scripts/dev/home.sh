# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# A home is a folder with one mesh: `env` (ports, addresses, paths), `master.key`, `secrets.key`,
# `token.key`, `postgres.password`, `nats.passwords`, `data/`, `nats/`, `postgres/`, `logs/`, `run/`
# (pid files). `./dev up` uses .construct itself. The demo, the tests and the benchmarks each have
# one inside it, so that they never disturb a running mesh.

port_names=(nats nats_monitor postgres gateway providers gateway_health reconciler_health interpreter_health providers_health scanner_health)

# home_open FOLDER: makes it the current home and creates it on first use.
home_open() {
  home=$1
  local folder
  mkdir -p -- "$main_home" "$home"
  for folder in "$main_home" "$home"; do
    [[ -O $folder ]] || die "$folder belongs to another user ($(stat -c %U -- "$folder")). Use that user, or another folder: CONSTRUCT_HOME=… ./dev …"
    # PostgreSQL refuses to run as root; its own user must be able to reach its folder.
    if ((EUID == 0)); then chmod 711 -- "$folder"; fi
  done
  mkdir -p -- "$home"/{run,logs,data}
  home_settings_lock
  home_key master
  home_key secrets
  home_key token
  home_password postgres
  home_nats_passwords
  home_env_read
  home_env_write
  exec 7>&-
}

# home_key NAME: creates a key on first use.
home_key() {
  local file=$home/$1.key
  if [[ -s $file ]]; then return 0; fi
  head -c 32 /dev/urandom | base64 -w 0 >"$file.new"
  mv -- "$file.new" "$file"
}

# home_password SERVER: creates a password on first use. Hexadecimal digits need no quoting in
# addresses or files.
home_password() {
  local file=$home/$1.password
  if [[ -s $file ]]; then return 0; fi
  head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$file.new"
  mv -- "$file.new" "$file"
}

# One password for each NATS user, and one for the user that may do everything. They begin with a
# letter, because the server parses the values of variables as configuration.
home_nats_passwords() {
  local file=$home/nats.passwords name password
  declare -gA nats_passwords=()
  touch -- "$file"
  while IFS='=' read -r name password; do nats_passwords[$name]=$password; done <"$file"
  for name in gateway interpreter providers reconciler scanner slack tap admin; do
    if [[ -z ${nats_passwords[$name]:-} ]]; then
      nats_passwords[$name]=p$(head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
      printf '%s=%s\n' "$name" "${nats_passwords[$name]}" >>"$file"
    fi
  done
}

# One script at a time creates, reads and replaces the files of a home, including scripts that start
# nothing.
home_settings_lock() {
  exec 7>"$home/run/settings"
  flock 7
}

# Loads the stored ports; the rest of the file is derived from them and never read.
home_env_read() {
  local name value
  declare -gA ports=()
  if [[ -e $home/env ]]; then
    while IFS='=' read -r name value; do
      if [[ $name == dev_port_* && $value =~ ^[0-9]+$ ]]; then ports[${name#dev_port_}]=$value; fi
    done <"$home/env"
  fi
  for name in "${port_names[@]}"; do
    if [[ -z ${ports[$name]:-} ]]; then home_port_choose "$name"; fi
  done
}

# Chooses a free port below the kernel's range for clients. The development gateway gets its default
# port if possible, so that `construct` finds it without configuration.
home_port_choose() {
  local candidate=60080
  if [[ $1 != gateway || $home != "$main_home" ]] || port_open "$candidate"; then
    candidate=$((20000 + RANDOM % 10000))
    while port_open "$candidate" || [[ " ${ports[*]} " == *" $candidate "* ]]; do
      candidate=$((20000 + RANDOM % 10000))
    done
  fi
  ports[$1]=$candidate
}

# home_ports_claim NAME...: called before processes start on these ports. Replaces ports that
# another program has taken meanwhile.
home_ports_claim() {
  local name
  home_settings_lock
  for name in "$@"; do
    if port_open "${ports[$name]}"; then
      warn "port ${ports[$name]} ($name) is used by another program; choosing another"
      home_port_choose "$name"
    fi
  done
  home_env_write
  exec 7>&-
}

# home_operator_claim [PID]: decides, before the gateway is started or updated, whether it serves
# the operator protocol. With its PID, it is running and owns the stored port. Clients expect 60100,
# so one mesh of a machine has it, and the others have none. CONSTRUCT_GATEWAY_OPERATOR_LISTEN
# overrides the decision, even if it is empty.
home_operator_claim() {
  local candidate=${ports[operator]:-60100}
  home_settings_lock
  if [[ $home != "$main_home" || -n ${CONSTRUCT_GATEWAY_OPERATOR_LISTEN+set} ]]; then
    unset 'ports[operator]'
  elif [[ -n ${1:-} && -n ${ports[operator]:-} ]]; then
    : # It is the gateway that has it open.
  elif port_taken "$candidate"; then
    warn "port $candidate is used by another program, so this mesh goes without the operator protocol; where else: CONSTRUCT_GATEWAY_OPERATOR_LISTEN=127.0.0.1:60101 ./dev up"
    unset 'ports[operator]'
  else
    ports[operator]=$candidate
  fi
  home_env_write
  exec 7>&-
}

home_env_write() {
  local name
  settings=(
    # For people, who may only watch; each service has its own.
    "CONSTRUCT_NATS_URL=$(nats_url tap)"
    "CONSTRUCT_DATABASE_URL=$(postgres_url construct)"
    "CONSTRUCT_DATA_DIR=$home/data"
    "CONSTRUCT_MASTER_KEY_FILE=$home/master.key"
    "CONSTRUCT_SECRETS_KEY_FILE=$home/secrets.key"
    "CONSTRUCT_TOKEN_KEY_FILE=$home/token.key"
    "CONSTRUCT_GATEWAY_LISTEN=127.0.0.1:${ports[gateway]}"
    "CONSTRUCT_GATEWAY_URL=http://127.0.0.1:${ports[gateway]}"
    "CONSTRUCT_PROXY_URL=http://127.0.0.1:${ports[providers]}"
  )
  {
    printf '# Written by ./dev, which remembers the ports here. To use the mesh of this folder in a shell: . %q\n' "$home/env"
    for name in "${port_names[@]}"; do printf 'dev_port_%s=%s\n' "$name" "${ports[$name]}"; done
    if [[ -n ${ports[operator]:-} ]]; then printf 'dev_port_operator=%s\n' "${ports[operator]}"; fi
    for name in "${settings[@]}"; do printf 'export %s=%q\n' "${name%%=*}" "${name#*=}"; done
    # Not among the settings: no service receives it, and running services need no restart when it
    # changes.
    if [[ -n ${ports[operator]:-} ]]; then printf 'export CONSTRUCT_OPERATOR=127.0.0.1:%s\n' "${ports[operator]}"; fi
  } >"$home/env.new"
  # An unchanged file keeps its time. It is replaced atomically, so that a reader never sees half of
  # it.
  if cmp -s -- "$home/env.new" "$home/env"; then rm -f -- "$home/env.new"; else mv -- "$home/env.new" "$home/env"; fi
}

# Deletes all data of the home's servers, for homes that start empty every time. The servers must be
# stopped.
home_forget() { rm -rf -- "$home/nats" "$home/data" && mkdir -- "$home/data"; }

# Exports the settings of the home, overriding those of the caller's shell.
home_export() {
  unset CONSTRUCT_MASTER_KEY CONSTRUCT_SECRETS_KEY CONSTRUCT_TOKEN_KEY
  export "${settings[@]}"
}

# One start or stop at a time per home; waits for its turn. Every command that changes processes
# calls it first.
home_lock() {
  exec 9>"$home/run/lock"
  if ! flock -n 9; then
    note "waiting for another ./dev that works in $home"
    flock -w 600 9 || die "another ./dev has been working in $home for 10 minutes"
  fi
  # The previous one may have replaced a port.
  home_settings_lock
  home_env_read
  home_env_write
  exec 7>&-
}

home_unlock() { exec 9>&-; }

# Commands that start processes are refused while the daemon runs the mesh (it keeps `run/daemon`
# locked): they would start the gateway without the daemon's socket.
home_daemon_refuse() {
  if [[ -n ${DEV_DAEMON:-} || ! -e $home/run/daemon ]]; then return 0; fi
  if ! flock -n -s 6; then
    die "the daemon runs this mesh: construct daemon stop ends it, systemctl --user restart construct.service restarts it"
  fi 6<"$home/run/daemon"
}

# home_session exclusive|shared WHAT: held while this script uses the home. The demo and the
# benchmarks need it exclusively. Several test runs share it, and wait for one that is stopping the
# servers.
home_session() {
  exec 8>"$home/run/session"
  case $1 in
    exclusive) flock -n -x 8 || die "another $2 is running in $home" ;;
    *) flock -w 60 -s 8 || die "another ./dev uses $home exclusively" ;;
  esac
}

# Ends a shared session. Succeeds if it was the last one; the home is then exclusive to this script.
home_session_last() { flock -n -x 8; }
