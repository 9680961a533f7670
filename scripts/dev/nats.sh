# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# A private NATS server with JetStream (its own port on the loopback address, a user with a random
# password for each service), and the two servers together as `infra`.

nats_start() {
  local fingerprint name
  local -a variables=("PATH=$PATH")
  fingerprint=$(cat -- "$root/deploy/nats/permissions.conf" "$home/nats.passwords" | cksum)
  fingerprint=${fingerprint// /.}
  if process_running nats; then
    if [[ $(process_fingerprint nats) == "$fingerprint" ]]; then
      nats_wait || die "NATS runs but does not answer; see $home/logs/nats.log, or try ./dev infra down"
      return 0
    fi
    note "restarting NATS: who may do what there has changed"
    process_stop TERM 10 nats
  fi
  process_stop_orphans nats
  home_ports_claim nats nats_monitor
  mkdir -p -- "$home/nats"
  # Created anew, so that it gets our umask's mode whatever mode an older file had.
  rm -f -- "$home/nats.conf" "$home/permissions.conf"
  # Benchmarks, and people who investigate something, may do everything as `admin`.
  sed 's/^users: \[$/&\n  {user: admin, password: $CONSTRUCT_NATS_ADMIN_PASSWORD}/' "$root/deploy/nats/permissions.conf" >"$home/permissions.conf"
  cat >"$home/nats.conf" <<CONF
# Written by ./dev at every start.
server_name: construct
# A client that may publish here commands the interpreter: on a machine with several users, the
# loopback address alone would let all of them.
authorization { include "permissions.conf" }
listen: 127.0.0.1:${ports[nats]}
http: 127.0.0.1:${ports[nats_monitor]}
jetstream {
  store_dir: "${home//\"/\\\"}/nats"
  max_memory_store: 512MB
  max_file_store: 10GB
}
CONF
  for name in "${!nats_passwords[@]}"; do variables+=("$(nats_variable "$name")=${nats_passwords[$name]}"); done
  process_start nats "$fingerprint" "${variables[@]}" -- "$(command -v nats-server)" -c "$home/nats.conf"
  if ! nats_wait; then
    show_tail "$home/logs/nats.log"
    die "NATS did not start"
  fi
}

# nats_variable USER: prints the environment variable with the user's password, as in
# deploy/nats/permissions.conf.
nats_variable() { printf 'CONSTRUCT_NATS_%s_PASSWORD' "${1^^}"; }

# nats_url USER
nats_url() { printf 'nats://%s:%s@127.0.0.1:%s' "$1" "${nats_passwords[$1]}" "${ports[nats]}"; }

# Its health check includes JetStream, whose recovery reads the whole store.
nats_wait() {
  local deadline=$(($(now_ms) + 60000))
  until http_get "${ports[nats_monitor]}" /healthz >/dev/null; do
    process_running nats || return 1
    (($(now_ms) < deadline)) || return 1
    sleep 0.05
  done
}

# infra_up durable|disposable
infra_up() {
  if [[ -e $home/restoring ]]; then die "a restore of $home was interrupted; repeat it"; fi
  nats_start
  postgres_start "$1"
}

infra_down() {
  # For PostgreSQL, INT means: end the sessions, write everything, stop.
  process_stop INT 20 postgres
  process_stop TERM 10 nats
}

infra_status() {
  local all=0 state
  state=stopped
  if process_running nats; then
    if http_get "${ports[nats_monitor]}" /healthz >/dev/null; then state=ready; else state='not ready'; fi
  fi
  [[ $state == ready ]] || all=3
  status_line nats "$state" "nats://127.0.0.1:${ports[nats]}, users in $home/nats.passwords, monitor http://127.0.0.1:${ports[nats_monitor]}"
  state=stopped
  if process_running postgres; then
    if "$(postgres_bin_find)/pg_isready" -q -h 127.0.0.1 -p "${ports[postgres]}"; then state=ready; else state='not ready'; fi
  fi
  [[ $state == ready ]] || all=3
  status_line postgres "$state" "127.0.0.1:${ports[postgres]}, user and database construct"
  return "$all"
}

# status_line NAME STATE ADDRESS
status_line() {
  local pid
  pid=$(process_pid "$1") || pid=-
  printf '%-12s %-10s %8s  %s\n' "$1" "$2" "$pid" "$3"
}

infra_command() {
  local verb=${1:-}
  case $verb in
    up)
      ensure_packages servers
      home_open "$main_home"
      home_lock
      timed "starting NATS and PostgreSQL in $home" infra_up durable
      infra_status
      ;;
    down)
      home_open "$main_home"
      home_lock
      local service
      for service in "${services[@]}"; do
        if process_running "$service"; then die "services are running; ./dev down stops everything"; fi
      done
      timed "stopping NATS and PostgreSQL" infra_down
      ;;
    status)
      home_open "$main_home"
      infra_status
      ;;
    *) die "usage: ./dev infra up|down|status" ;;
  esac
}
