# shellcheck shell=bash disable=SC2154 # What the parts share is set in `dev` and in the parts it loads first.
# A private NATS server with JetStream (own port on the loopback address, a random password), and the two servers together as `infra`.

nats_start() {
  if process_running nats; then
    nats_wait || die "NATS runs but does not answer; see $home/logs/nats.log, or try ./dev infra down"
    return 0
  fi
  process_stop_orphans nats
  home_ports_claim nats nats_monitor
  mkdir -p -- "$home/nats"
  # Made anew, so that it gets our umask's mode whatever an older file had.
  rm -f -- "$home/nats.conf"
  cat >"$home/nats.conf" <<CONF
# Written by ./dev at every start.
server_name: construct
# Who may publish here commands the interpreter: on a machine with several users, loopback alone would let all of them.
authorization {
  user: construct
  password: "$(<"$home/nats.password")"
}
listen: 127.0.0.1:${ports[nats]}
http: 127.0.0.1:${ports[nats_monitor]}
jetstream {
  store_dir: "${home//\"/\\\"}/nats"
  max_memory_store: 512MB
  max_file_store: 10GB
}
CONF
  process_start nats - PATH="$PATH" -- "$(command -v nats-server)" -c "$home/nats.conf"
  if ! nats_wait; then
    show_tail "$home/logs/nats.log"
    die "NATS did not start"
  fi
}

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
  if [[ -e $home/restoring ]]; then die "a restore of $home was interrupted; do it again"; fi
  nats_start
  postgres_start "$1"
}

infra_down() {
  # For PostgreSQL, INT means: end the sessions, write everything down, stop.
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
  status_line nats "$state" "nats://127.0.0.1:${ports[nats]}, user construct, monitor http://127.0.0.1:${ports[nats_monitor]}"
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
