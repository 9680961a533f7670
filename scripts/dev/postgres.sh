# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# A private PostgreSQL: its own folder, its own port on the loopback address, no socket file, a
# random password (SCRAM).

# Prints the folder of the server's programs: the version that created the data, else the newest one
# installed.
postgres_bin_find() {
  local version='' folder
  local -a folders=()
  if [[ -n ${home:-} ]]; then
    { version=$(as_postgres cat -- "$(postgres_folder)/data/PG_VERSION"); } 2>/dev/null || version=''
  fi
  if [[ -n $version && -x /usr/lib/postgresql/$version/bin/postgres ]]; then
    printf '%s' "/usr/lib/postgresql/$version/bin"
    return 0
  fi
  mapfile -t folders < <(printf '%s\n' /usr/lib/postgresql/*/bin | sort -t / -k 5 -V -r)
  for folder in "${folders[@]}" "$(pg_config --bindir 2>/dev/null || true)"; do
    if [[ -x $folder/postgres && -x $folder/initdb ]]; then
      printf '%s' "$folder"
      return 0
    fi
  done
  return 1
}

# The server refuses to run as root: then Debian's own user for it runs it.
as_postgres() {
  if ((EUID == 0)); then setpriv --reuid=postgres --regid=postgres --init-groups -- "$@"; else "$@"; fi
}

# The folder of the cluster: in the home, unless its user cannot reach it (root's own folder is
# closed to it).
postgres_folder() {
  if ((EUID == 0)) && ! as_postgres test -x "$home" 2>/dev/null; then
    printf '/var/lib/construct-dev/%s' "$(printf '%s' "$home" | sha256sum | head -c 16)"
  else
    printf '%s/postgres' "$home"
  fi
}

# postgres_start durable|disposable: running and ready when it returns. A disposable one (for tests)
# skips flushes to disk, and is recreated when it cannot be started.
postgres_start() {
  local kind=$1 folder bin
  if process_running postgres; then
    postgres_wait || die "PostgreSQL runs but does not answer; see $home/logs/postgres.log, or try ./dev infra down"
    return 0
  fi
  process_stop_orphans postgres
  folder=$(postgres_folder)
  bin=$(postgres_bin_find) || die "PostgreSQL's programs were not found"
  home_ports_claim postgres
  postgres_create "$folder" "$bin" "$kind"
  if ! postgres_launch "$folder" "$bin" "$kind"; then
    if [[ $kind == disposable ]]; then
      warn "the test database does not start and is made anew"
      rm -rf -- "$folder/data"
      postgres_create "$folder" "$bin" "$kind"
      if postgres_launch "$folder" "$bin" "$kind"; then return 0; fi
    fi
    show_tail "$home/logs/postgres.log"
    die "PostgreSQL did not start"
  fi
}

postgres_create() {
  local folder=$1 bin=$2 kind=$3 owner
  local -a flags=()
  # A cluster outside a deleted home has an unknown password.
  if [[ $folder != "$home"/* && -d $folder && ! -e $home/postgres.outside ]]; then rm -rf -- "$folder"; fi
  if as_postgres test -s "$folder/data/PG_VERSION"; then return 0; fi
  note "creating a PostgreSQL cluster in $folder"
  mkdir -p -- "$folder"
  if [[ $folder != "$home"/* ]]; then
    chmod 755 -- "${folder%/*}"
    printf '%s\n' "$folder" >"$home/postgres.outside"
  fi
  if ((EUID == 0)); then
    owner=postgres
    chown "$owner:" -- "$folder"
  fi
  if [[ $kind == disposable ]]; then flags+=(--no-sync); fi
  # Created beside and moved: an interrupted initdb leaves nothing that looks like a cluster.
  rm -rf -- "$folder/data" "$folder/new"
  as_postgres tee -- "$folder/password" <"$home/postgres.password" >/dev/null
  if ! (cd / && as_postgres "$bin/initdb" -D "$folder/new" --username=construct --pwfile="$folder/password" --auth=scram-sha-256 \
    --encoding=UTF8 --locale=C.UTF-8 --data-checksums "${flags[@]}") >>"$home/logs/postgres.log" 2>&1; then
    show_tail "$home/logs/postgres.log"
    die "initdb failed"
  fi
  rm -f -- "$folder/password"
  mv -- "$folder/new" "$folder/data"
}

# Retries as long as the only obstacle is the remains of a killed server: its child processes need a
# moment to notice.
postgres_launch() {
  local folder=$1 bin=$2 kind=$3 attempt pid written=0
  local -a options=(
    -c listen_addresses=127.0.0.1 -c "port=${ports[postgres]}" -c unix_socket_directories=
    -c max_connections=400 -c logging_collector=off -c log_destination=stderr -c timezone=UTC -c log_timezone=UTC
  )
  local -a wrapper=()
  if ((EUID == 0)); then wrapper=(setpriv --reuid=postgres --regid=postgres --init-groups --); fi
  if [[ $kind == disposable ]]; then
    options+=(-c fsync=off -c synchronous_commit=off -c full_page_writes=off)
    # A test that ends while a connection of its pool is logging in drops its database from the
    # thread that would answer for that connection, and DROP DATABASE waits for every process of the
    # server: without this, for a minute.
    options+=(-c authentication_timeout=5s)
  fi
  for attempt in {1..20}; do
    # The server trusts any living process with the pid in its lock file, which after a reboot may
    # be an unrelated one.
    if pid=$(as_postgres head -n 1 -- "$folder/data/postmaster.pid" 2>/dev/null); then
      if [[ $(readlink -- "/proc/$pid/cwd" || true) == "$folder/data" ]]; then
        die "a PostgreSQL that ./dev did not start runs on $folder/data (pid $pid); stop it first"
      fi
      rm -f -- "$folder/data/postmaster.pid"
    fi
    written=$(stat -c %s -- "$home/logs/postgres.log" 2>/dev/null || echo 0)
    process_start postgres "$kind" PATH="$PATH" LANG=C.UTF-8 -- "${wrapper[@]}" "$bin/postgres" -D "$folder/data" "${options[@]}"
    if postgres_wait; then return 0; fi
    if process_running postgres; then return 1; fi
    tail -c "+$((written + 1))" -- "$home/logs/postgres.log" | grep -q 'shared memory block\|could not bind' || return 1
    note "PostgreSQL's last life is still ending (attempt $attempt)"
    sleep 0.5
  done
  return 1
}

# Waits until it accepts connections (recovery after a crash takes a while) and the database exists.
# Fails when the server ends, or after two minutes.
postgres_wait() {
  local deadline=$(($(now_ms) + 120000)) bin
  bin=$(postgres_bin_find)
  until "$bin/pg_isready" -q -h 127.0.0.1 -p "${ports[postgres]}"; do
    process_running postgres || return 1
    (($(now_ms) < deadline)) || return 1
    sleep 0.05
  done
  if [[ $(postgres_query postgres "SELECT 1 FROM pg_database WHERE datname = 'construct'") != 1 ]]; then
    postgres_query postgres 'CREATE DATABASE construct' || return 1
  fi
}

# postgres_query DATABASE SQL: prints the rows without decoration.
postgres_query() {
  local bin
  bin=$(postgres_bin_find)
  PGPASSWORD=$(<"$home/postgres.password") "$bin/psql" -X -q -A -t -v ON_ERROR_STOP=1 \
    -h 127.0.0.1 -p "${ports[postgres]}" -U construct -d "$1" -c "$2"
}

# Drops every database except those of the cluster itself. Only for disposable homes.
postgres_drop_all() {
  local database
  while IFS= read -r database; do
    postgres_query postgres "DROP DATABASE \"$database\" WITH (FORCE)"
  done < <(postgres_query postgres "SELECT datname FROM pg_database WHERE NOT datistemplate AND datname <> 'postgres'")
  postgres_query postgres 'CREATE DATABASE construct'
}

# postgres_url DATABASE
postgres_url() {
  printf 'postgres://construct:%s@127.0.0.1:%s/%s' "$(<"$home/postgres.password")" "${ports[postgres]}" "$1"
}
