# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# The services as processes, in addition to the two servers.

services=(gateway reconciler interpreter providers scanner)
# The lock file is frozen in CI: a build there must use the committed one.
cargo_flags=()
if [[ ${CI:-} == true ]]; then cargo_flags+=(--locked); fi
# Checked queries use their committed metadata, whatever database the caller's shell points to.
export SQLX_OFFLINE=true

# Cargo's target folder; cargo, started in the root, resolves a relative CARGO_TARGET_DIR the same
# way.
target_dir=$(realpath -m -- "${CARGO_TARGET_DIR:-target}")
bin_dir=$target_dir/debug

# The number of sockets, from descriptor 3, on which the parent already listens for the gateway.
# Only the daemon passes any (`construct daemon run`).
sockets=${DEV_LISTEN_FDS:-0}

mesh_build() { as_caller cargo build "${cargo_flags[@]}" --workspace --exclude construct-benches --bins; }

# The environment of a service: the settings of the home and a few variables of the caller, nothing
# else. Vendor keys are not included (they reach the mesh through its API). The database is for the
# three services that may write it, the master key for the three that encrypt and decrypt
# credentials, the key of scripts' secrets for the two that encrypt and decrypt those, and the key
# of tokens for those that sign and verify them: not the one that runs scripts.
mesh_service_environment() {
  local service=$1 setting name
  variables=("CONSTRUCT_HEALTH_LISTEN=127.0.0.1:${ports[${service}_health]}")
  for setting in "${settings[@]}"; do
    case $service:${setting%%=*} in
      *:CONSTRUCT_NATS_URL) variables+=("CONSTRUCT_NATS_URL=$(nats_url "$service")") ;;
      interpreter:CONSTRUCT_DATABASE_URL | providers:CONSTRUCT_DATABASE_URL) ;;
      interpreter:CONSTRUCT_MASTER_KEY_FILE | reconciler:CONSTRUCT_MASTER_KEY_FILE) ;;
      reconciler:CONSTRUCT_SECRETS_KEY_FILE | providers:CONSTRUCT_SECRETS_KEY_FILE) ;;
      interpreter:CONSTRUCT_TOKEN_KEY_FILE | scanner:CONSTRUCT_TOKEN_KEY_FILE | scanner:CONSTRUCT_SECRETS_KEY_FILE) ;;
      *) variables+=("$setting") ;;
    esac
  done
  if [[ $service == providers ]]; then variables+=("CONSTRUCT_PROVIDERS_PROXY_LISTEN=127.0.0.1:${ports[providers]}"); fi
  if [[ $service == gateway ]]; then variables+=("CONSTRUCT_GATEWAY_SCANS_DIR=$home/scans"); fi
  if [[ $service == gateway && -n ${ports[operator]:-} ]]; then
    variables+=("CONSTRUCT_GATEWAY_OPERATOR_LISTEN=127.0.0.1:${ports[operator]}")
  fi
  if [[ $service == gateway ]] && ((sockets > 0)); then variables+=("LISTEN_FDS=$sockets"); fi
  if [[ $service == scanner ]]; then
    variables+=("CONSTRUCT_SCANNER_DIR=$home/scans" "CONSTRUCT_SCANNER_GATEWAY_URL=http://127.0.0.1:${ports[gateway]}")
  fi
  if [[ $service == interpreter ]]; then
    variables+=("CONSTRUCT_INTERPRETER_LLM_URL=http://127.0.0.1:${ports[providers]}")
    # Compiled once for all homes.
    variables+=("CONSTRUCT_INTERPRETER_CACHE_DIR=$main_home/cache")
    variables+=("CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS=$(mesh_workspace_roots),$home/scans")
    variables+=("CONSTRUCT_INTERPRETER_HIDDEN_PATHS=$(mesh_hidden_paths)")
  fi
  for name in $(compgen -e); do
    case $name in
      CONSTRUCT_INTERPRETER_CACHE_DIR | CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS | CONSTRUCT_INTERPRETER_HIDDEN_PATHS) ;;
      CONSTRUCT_INTERPRETER_LLM_URL | CONSTRUCT_PROVIDERS_PROXY_LISTEN) ;;
      CONSTRUCT_GATEWAY_SCANS_DIR | CONSTRUCT_SCANNER_DIR | CONSTRUCT_SCANNER_GATEWAY_URL) ;;
      CONSTRUCT_HOME | CONSTRUCT_OPERATOR | CONSTRUCT_MASTER_KEY | CONSTRUCT_SECRETS_KEY | CONSTRUCT_TOKEN_KEY | CONSTRUCT_DEMO_* | CONSTRUCT_TEST_* | CONSTRUCT_HEALTH_LISTEN) ;;
      PATH | HOME | USER | LANG | LC_* | TZ | TMPDIR | RUST_* | OTEL_* | CONSTRUCT_* | *_PROXY | *_proxy | SSL_CERT_*)
        # The home's settings override the same names in the caller's shell.
        if [[ " ${settings[*]%%=*} " != *" $name "* ]]; then variables+=("$name=${!name}"); fi
        ;;
      *) ;;
    esac
  done
}

# Set by the demo.
workspace_root=''

# Hidden from tasks although the checkout is granted: the keys, passwords, data and backups of every
# home.
mesh_hidden_paths() {
  local folder name list=''
  for folder in "$main_home" "$main_home"/*/; do
    for name in master.key secrets.key token.key postgres.password nats.password nats.passwords nats.conf env compose.env postgres nats logs backups; do
      if [[ -e ${folder%/}/$name ]]; then list+=${list:+,}${folder%/}/$name; fi
    done
  done
  printf '%s' "$list"
}

# Prints the directories that tasks may use as their workspace, including their subdirectories, as a
# comma-separated list: the demo's own folder in the demo; else the caller's
# CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS; else the caller's home directory and this checkout. Never
# everything: then /etc and /proc would be workspaces too.
mesh_workspace_roots() {
  local folder roots=''
  if [[ -n $workspace_root ]]; then
    printf '%s' "$workspace_root"
    return 0
  fi
  if [[ -n ${CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS:-} ]]; then
    printf '%s' "$CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS"
    return 0
  fi
  for folder in "${HOME:-}" "$root"; do
    folder=$(realpath -e -- "$folder" 2>/dev/null) || continue
    # A user without a real home directory may have / in its place; a comma would end the name.
    if [[ -d $folder && $folder != / && $folder != *,* ]]; then roots+=${roots:+,}$folder; fi
  done
  printf '%s' "$roots"
}

# The build and the settings: when either changes, `up` restarts the service.
mesh_fingerprint() {
  local build environment
  local -a given=("${variables[@]}")
  # Another socket at the same path is another setting.
  if [[ $1 == gateway ]] && ((sockets > 0)); then given+=("$(readlink -- /proc/$$/fd/3)"); fi
  build=$(stat -L -c '%i.%s.%Y' -- "$bin_dir/construct-$1")
  environment=$(printf '%s\n' "${given[@]}" | cksum)
  printf '%s.%s' "$build" "${environment// /.}"
}

# Starts missing services, restarts outdated ones, and waits for all.
mesh_start() {
  local service
  local -a outdated=() variables=()
  for service in "${services[@]}"; do
    [[ -x $bin_dir/construct-$service ]] || die "$bin_dir/construct-$service was not built; ./dev build does it"
  done
  # Before the interpreter starts: its workspace roots and hidden folders must exist.
  mkdir -p -- "$home"/{scans,backups}
  # Ports first: replacing one changes the settings of all services.
  for service in "${services[@]}"; do
    if ! process_running "$service"; then
      process_stop_orphans "$service"
      home_ports_claim "${service}_health"
      if [[ $service == gateway || $service == providers ]]; then home_ports_claim "$service"; fi
    fi
  done
  home_operator_claim "$(process_pid gateway || true)"
  for service in "${services[@]}"; do
    mesh_service_environment "$service"
    if process_running "$service" && [[ $(process_fingerprint "$service") != "$(mesh_fingerprint "$service")" ]]; then
      outdated+=("$service")
    fi
  done
  if ((${#outdated[@]} > 0)); then
    note "restarting with the new build or settings: ${outdated[*]}"
    process_stop TERM 10 "${outdated[@]}"
  fi
  for service in "${services[@]}"; do
    if ! process_running "$service"; then
      mesh_service_environment "$service"
      process_start "$service" "$(mesh_fingerprint "$service")" "${variables[@]}" -- "$bin_dir/construct-$service"
    fi
  done
  for service in "${services[@]}"; do mesh_wait "$service"; done
}

# Waits up to two minutes until a service is ready (the first start on a machine compiles the
# sandbox's guest), and explains a failure.
mesh_wait() {
  local service=$1 deadline answer=''
  deadline=$(($(now_ms) + 120000))
  until answer=$(http_get "${ports[${service}_health]}" /readyz); do
    if ! process_running "$service"; then
      show_tail "$home/logs/$service.log"
      die "$service ended before it was ready"
    fi
    if (($(now_ms) >= deadline)); then
      show_tail "$home/logs/$service.log"
      die "$service is not ready after 120 s: ${answer:-no answer on 127.0.0.1:${ports[${service}_health]}/readyz}"
    fi
    sleep 0.05
  done
  note "$service is ready"
}

mesh_stop() {
  process_stop TERM 10 "${services[@]}"
  infra_down
}

mesh_command_build() {
  ensure_rust
  ensure_packages servers sandbox compiler
  timed "building" mesh_build
}

mesh_command_up() {
  local operator=''
  home_open "$main_home"
  # Before its programs are rebuilt, and once more when no other script can start.
  home_daemon_refuse
  case ${1:-} in
    --built) ensure_packages servers sandbox ;;
    '') mesh_command_build ;;
    *) die "usage: ./dev up [--built]" ;;
  esac
  home_lock
  home_daemon_refuse
  timed "starting NATS and PostgreSQL in $home" infra_up durable
  timed "starting the services" mesh_start
  if [[ -n ${ports[operator]:-} ]]; then
    operator=$'\n'"  operator   127.0.0.1:${ports[operator]}  (lines of JSON, also over WebSocket: docs/api.md)"
  fi
  cat <<TEXT

The mesh is up.
  gateway    http://127.0.0.1:${ports[gateway]}  (gRPC)$operator
  models     http://127.0.0.1:${ports[providers]}  (OpenAI's and Anthropic's protocols, with a token of: construct token create)
  NATS       nats://127.0.0.1:${ports[nats]}  (users and passwords in $home/nats.passwords; CONSTRUCT_NATS_URL below is for construct tap)
  PostgreSQL 127.0.0.1:${ports[postgres]}
  logs       $home/logs/
  workspaces $(mesh_workspace_roots)  (others: CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS=/a,/b ./dev up)

In a shell:
  . $(printf %q "$home/env")
  $bin_dir/construct --help
  ./dev logs -f reconciler      ./dev status      ./dev down
TEXT
}

mesh_command_down() {
  home_open "$main_home"
  home_lock
  timed "stopping everything in $home" mesh_stop
}

# Waits until a process of the mesh has ended, and fails; or until the mesh was stopped on purpose.
mesh_command_watch() {
  local name
  home_open "$main_home"
  while true; do
    for name in nats postgres "${services[@]}"; do
      if process_running "$name"; then continue; fi
      # A script that stops or restarts something holds the lock until it is done.
      home_lock
      if ! process_running "$name"; then
        if [[ ! -e $home/run/$name.pid ]]; then
          note "$name was stopped"
          return 0
        fi
        show_tail "$home/logs/$name.log"
        die "$name has ended"
      fi
      home_unlock
    done
    sleep 1
  done
}

mesh_command_status() {
  local service state answer all=0
  home_open "$main_home"
  infra_status || all=3
  for service in "${services[@]}"; do
    state=stopped answer=''
    if process_running "$service"; then
      if answer=$(http_get "${ports[${service}_health]}" /readyz); then state=ready answer=''; else state='not ready'; fi
    fi
    [[ $state == ready ]] || all=3
    if [[ $service == gateway ]]; then
      answer="http://127.0.0.1:${ports[gateway]} ${ports[operator]:+operator 127.0.0.1:${ports[operator]} }$answer"
    fi
    status_line "$service" "$state" "health http://127.0.0.1:${ports[${service}_health]} ${answer//$'\n'/ }"
  done
  return "$all"
}

mesh_command_restart() {
  local service=${1:-} known
  for known in "${services[@]}"; do
    if [[ $# == 1 && $service == "$known" ]]; then
      home_open "$main_home"
      home_daemon_refuse
      ensure_rust
      timed "building construct-$service" as_caller cargo build "${cargo_flags[@]}" -p "construct-$service" --bins
      home_lock
      # It may have started during the build.
      home_daemon_refuse
      if ! process_running nats || ! process_running postgres; then die "the mesh is not running; ./dev up starts it"; fi
      process_stop TERM 10 "$service"
      local -a variables=()
      home_ports_claim "${service}_health"
      if [[ $service == gateway || $service == providers ]]; then home_ports_claim "$service"; fi
      if [[ $service == gateway ]]; then home_operator_claim; fi
      mesh_service_environment "$service"
      process_start "$service" "$(mesh_fingerprint "$service")" "${variables[@]}" -- "$bin_dir/construct-$service"
      timed "waiting for $service" mesh_wait "$service"
      return 0
    fi
  done
  die "usage: ./dev restart SERVICE, which is one of: ${services[*]}"
}

mesh_command_logs() {
  local -a files=() options=(-n 200)
  local argument known
  home_open "$main_home"
  for argument in "$@"; do
    case $argument in
      -f | --follow) options+=(-F) ;;
      *)
        for known in nats postgres "${services[@]}"; do
          if [[ $argument == "$known" ]]; then files+=("$home/logs/$argument.log"); fi
        done
        [[ ${files[*]: -1} == "$home/logs/$argument.log" ]] || die "no logs of '$argument'; there are: nats postgres ${services[*]}"
        ;;
    esac
  done
  if ((${#files[@]} == 0)); then
    shopt -s nullglob
    files=("$home"/logs/*.log)
    shopt -u nullglob
  fi
  ((${#files[@]} > 0)) || die "there are no logs yet in $home/logs; ./dev up starts the mesh"
  exec tail "${options[@]}" -- "${files[@]}"
}
