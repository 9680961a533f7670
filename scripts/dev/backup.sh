# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# Backup and restore of a home (docs/operations.md). The first half is independent of homes: libpq's
# variables (PGHOST, PGDATABASE, …) name the database, and `places` the folders. The end-to-end
# tests use it for their meshes.

# Folders by the name of their archive: data, scans, streams. Missing ones are skipped.
declare -gA places=()
# Files with keys, by name: master, secrets, token.
declare -gA key_files=()

backup_query() { "$(postgres_bin_find)/psql" -X -q -A -t -v ON_ERROR_STOP=1 -d "${2:-$PGDATABASE}" -c "$1"; }

# backup_take FOLDER [--with-keys]: creates the folder, completely or not at all.
backup_take() {
  local folder=$1 keys=${2:-} bin schema
  bin=$(postgres_bin_find) || die "PostgreSQL's programs were not found"
  if [[ -e $folder ]]; then die "$folder exists already; a backup is never overwritten"; fi
  schema=$(backup_query "SELECT max(version) FROM _sqlx_migrations WHERE success" 2>/dev/null) || schema=''
  [[ -n $schema ]] || die "there is nothing to back up: the database has no schema"
  (umask 077 && mkdir -p -- "$(dirname -- "$folder")")
  backup_fill "$folder"
}

# Created beside the folder first, so that the backup is complete or missing.
backup_fill() (
  folder=$1
  new=$(umask 077 && mktemp -d -- "$(dirname -- "$folder")/.backup.XXXXXX")
  trap 'rm -rf -- "$new"' EXIT
  # In this order: a blob or a file is written before the row that names it and never changed, so
  # that a copy after the database contains everything that it names.
  (umask 077 && "$bin/pg_dump" --format=custom --no-owner --no-privileges --file="$new/database.dump") || die "the database cannot be dumped"
  for name in data scans streams; do
    if [[ -n ${places[$name]:-} && -d ${places[$name]} ]]; then backup_pack "$new/$name.tar.gz" "${places[$name]}"; fi
  done
  if [[ $keys == --with-keys ]]; then
    for name in "${!key_files[@]}"; do
      (umask 077 && cat -- "${key_files[$name]}" >"$new/$name.key") || die "${key_files[$name]} cannot be read"
    done
  fi
  (umask 077 && backup_manifest "$new" "$schema" >"$new/manifest")
  sync -- "$new"/* "$new"
  mv -T -- "$new" "$folder"
)

# Caches are recreated.
backup_pack() {
  local status=0
  # A task may have created unreadable files.
  (umask 077 && tar --exclude=./cache --ignore-failed-read -C "$2" -czf "$1" .) || status=$?
  # Status 1: a file changed while it was read. Blobs never change; in workspaces it is a file that
  # was being written.
  if ((status > 1)); then die "$2 cannot be copied"; fi
  if ((status == 1)); then warn "files in $2 changed while they were copied"; fi
}

# The data that a restore needs, one `name value` per line. Only the names of keys, which the
# database has as well.
backup_manifest() {
  local name file
  printf 'construct-backup 1\n'
  printf 'made %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
  printf 'version %s\n' "$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)"
  printf 'schema %s\n' "$2"
  printf 'postgresql %s\n' "$(backup_query 'SHOW server_version')"
  printf 'nats %s\n' "$(nats-server --version | sed 's/.*v//')"
  for name in master secrets token; do
    if [[ -n ${key_files[$name]:-} ]]; then backup_key_names "${key_files[$name]}" | sed "s/^/key $name /"; fi
  done
  for file in "$1"/*; do
    if [[ ${file##*/} != manifest ]]; then printf 'sha256 %s %s\n' "$(sha256sum <"$file" | cut -d ' ' -f 1)" "${file##*/}"; fi
  done
}

# The ids of the keys in a file, as `runtime::master_key` computes them.
backup_key_names() {
  local entry
  grep -v '^[[:space:]]*#' -- "$1" | tr -d ' \t\r' | tr ',' '\n' | while IFS= read -r entry || [[ -n $entry ]]; do
    case $entry in
      '') ;;
      *:*) printf '%s\n' "${entry%%:*}" ;;
      *) printf 'k%s\n' "$({ printf 'construct master key id\0' && base64 -d <<<"$entry"; } | sha256sum | head -c 8)" ;;
    esac
  done
}

# backup_value FOLDER NAME: a value of the backup's manifest.
backup_value() { sed -n "s/^$2 //p" -- "$1/manifest"; }

# Checks that the folder is a complete backup that this version can restore. Read-only.
backup_check() {
  local folder=$1 known made schema sum file
  [[ -r $folder/manifest ]] || die "$folder is not a backup: it has no manifest"
  [[ $(head -n 1 -- "$folder/manifest") == 'construct-backup 1' ]] || die "$folder was made by another version: its manifest cannot be read"
  [[ -n $(backup_value "$folder" sha256 | grep ' database.dump$') ]] || die "$folder/manifest is incomplete"
  while read -r sum file; do
    [[ $file != */* && -f $folder/$file ]] || die "$folder is incomplete: $file is missing"
    [[ $(sha256sum <"$folder/$file" | cut -d ' ' -f 1) == "$sum" ]] || die "$folder/$file is damaged: its checksum differs"
  done < <(backup_value "$folder" sha256)
  schema=$(backup_value "$folder" schema)
  known=$(find "$root/crates/store/migrations" -name '[0-9]*.sql' -printf '%f\n' | sort | tail -n 1)
  known=$((10#${known%%_*}))
  [[ $schema =~ ^[0-9]+$ ]] || die "$folder/manifest is incomplete"
  if ((schema > known)); then die "$folder is from a newer version: its schema is $schema, and this version has $known"; fi
  made=$(backup_value "$folder" nats)
  if [[ -n ${places[streams]:-} && -e $folder/streams.tar.gz ]] &&
    [[ $(printf '%s\n' "$made" "$(nats-server --version | sed 's/.*v//')" | sort -V | tail -n 1) != "$(nats-server --version | sed 's/.*v//')" ]]; then
    die "the streams are of NATS $made, which is newer than this one: restore without them (--without-streams)"
  fi
  "$(postgres_bin_find)/pg_restore" --list -- "$folder/database.dump" >/dev/null || die "PostgreSQL $(backup_value "$folder" postgresql) has made $folder/database.dump, and this one's pg_restore cannot read it"
}

# Ids of the backup's keys that are missing in the files of `key_files`.
backup_keys_missing() {
  local name key there
  while read -r name key; do
    there=''
    if [[ -n ${key_files[$name]:-} && -e ${key_files[$name]} ]]; then there=$(backup_key_names "${key_files[$name]}"); fi
    if [[ $'\n'$there$'\n' != *$'\n'"$key"$'\n'* ]]; then printf '%s (%s.key)\n' "$key" "$name"; fi
  done < <(backup_value "$1" key)
}

# backup_put FOLDER: replaces the present data. Nothing may use the database and the folders. After
# an interruption it must be repeated.
backup_put() {
  local folder=$1 bin name
  bin=$(postgres_bin_find)
  backup_query "DROP DATABASE IF EXISTS \"$PGDATABASE\" WITH (FORCE)" postgres
  backup_query "CREATE DATABASE \"$PGDATABASE\"" postgres
  "$bin/pg_restore" --no-owner --no-privileges --exit-on-error --single-transaction --dbname="$PGDATABASE" -- "$folder/database.dump" ||
    die "the database cannot be restored"
  # Without statistics, PostgreSQL would plan for empty tables for a while.
  backup_query ANALYZE
  for name in "${!places[@]}"; do
    # A task may have created inaccessible folders.
    chmod -R u+rwX -- "${places[$name]}" 2>/dev/null || true
    rm -rf -- "${places[$name]}"
    mkdir -p -- "${places[$name]}"
    if [[ -e $folder/$name.tar.gz ]]; then tar -C "${places[$name]}" -xpzf "$folder/$name.tar.gz" || die "${places[$name]} cannot be restored"; fi
  done
}

# The second half: homes.

backup_home() {
  local name
  export PGHOST=127.0.0.1 PGPORT=${ports[postgres]} PGUSER=construct PGDATABASE=construct PGPASSWORD
  PGPASSWORD=$(<"$home/postgres.password")
  places=([data]="$home/data" [scans]="$home/scans" [streams]="$home/nats")
  for name in master secrets token; do key_files[$name]=$home/$name.key; done
}

backup_command() {
  local folder='' keys='' streams=1 argument began
  for argument in "$@"; do
    case $argument in
      --with-keys) keys=--with-keys ;;
      --without-streams) streams='' ;;
      -*) die "usage: ./dev backup FOLDER [--with-keys] [--without-streams]" ;;
      *)
        [[ -z $folder ]] || die "usage: ./dev backup FOLDER [--with-keys] [--without-streams]"
        folder=$(realpath -m -- "$argument")
        ;;
    esac
  done
  [[ -n $folder ]] || die "usage: ./dev backup FOLDER [--with-keys] [--without-streams]"
  if [[ -e $folder ]]; then die "$folder exists already; a backup is never overwritten"; fi
  ensure_packages servers
  home_open "$main_home"
  home_lock
  if [[ -n $streams ]]; then home_daemon_refuse; fi
  if [[ -e $home/restoring ]]; then die "a restore of $home was interrupted: repeat it first (./dev restore)"; fi
  backup_home
  if backup_seen_by_tasks "$folder"; then
    if [[ -n $keys ]]; then die "$folder lies where tasks may work: they could read the keys. Use another folder, or $home/backups, which is hidden from them"; fi
    warn "$folder lies where tasks may work, and what is in it can be read by them; $home/backups is hidden"
  fi
  exit_run backup_resume
  if [[ -n $streams ]]; then
    # The streams must be from the same time as the database, and NATS writes them when it stops.
    backup_pause
  else
    unset 'places[streams]'
  fi
  if ! process_running postgres; then
    backup_stop_postgres=1
    timed "starting PostgreSQL in $home" postgres_start durable
  fi
  timed "backing up into $folder" backup_take "$folder" "$keys"
  if [[ -z $keys ]]; then
    note "without the keys of $home, what they encrypt cannot be read again: keep master.key and secrets.key, apart from this"
  fi
}

# backup_seen_by_tasks FOLDER: whether a task may use a workspace that contains it.
backup_seen_by_tasks() {
  local granted
  if [[ $1/ == "$home/backups/"* ]]; then return 1; fi
  while IFS= read -r -d , granted; do
    if [[ $1/ == "${granted%/}/"* ]]; then return 0; fi
  done <<<"$(mesh_workspace_roots),"
  return 1
}

# Services that were stopped for the backup, with their programs, builds and variables: they are
# restarted unchanged, whatever this shell's variables are.
declare -A backup_paused=()
backup_nats_paused='' backup_stop_postgres=''

backup_pause() {
  local service pid program name
  local -a variables kept
  for service in "${services[@]}"; do
    pid=$(process_pid "$service") || continue
    program=$(readlink -- "/proc/$pid/exe") || continue
    mapfile -d '' -t variables <"/proc/$pid/environ"
    kept=()
    for name in "${variables[@]}"; do
      case ${name%%=*} in _ | PWD | OLDPWD | SHLVL | DEV_PROCESS_MARK) ;; *) kept+=("$name") ;; esac
    done
    backup_paused[$service]=$(printf '%q ' "$service" "$(process_fingerprint "$service")" "${kept[@]}" -- "${program% (deleted)}")
  done
  if ((${#backup_paused[@]} > 0)); then timed "stopping the services temporarily" process_stop TERM 10 "${!backup_paused[@]}"; fi
  if process_running nats; then
    backup_nats_paused=1
    process_stop TERM 10 nats
  fi
}

backup_resume() {
  local service
  local -a command
  if [[ -n $backup_stop_postgres ]]; then process_stop INT 20 postgres; fi
  if [[ -n $backup_nats_paused ]]; then nats_start; fi
  if ((${#backup_paused[@]} == 0)); then return 0; fi
  say "restarting the services"
  for service in "${!backup_paused[@]}"; do
    eval "command=(${backup_paused[$service]})"
    process_start "${command[@]}"
  done
  for service in "${!backup_paused[@]}"; do mesh_wait "$service"; done
}

restore_command() {
  local usage="usage: ./dev restore FOLDER [--force] [--without-streams] [--other-keys]"
  local folder='' force='' streams=1 other='' argument name missing
  for argument in "$@"; do
    case $argument in
      --force) force=1 ;;
      --without-streams) streams='' ;;
      --other-keys) other=1 ;;
      -*) die "$usage" ;;
      *)
        [[ -z $folder ]] || die "$usage"
        folder=$(realpath -e -- "$argument") || die "$argument cannot be found"
        ;;
    esac
  done
  [[ -n $folder ]] || die "$usage"
  ensure_packages servers
  home_open "$main_home"
  home_lock
  home_daemon_refuse
  backup_home
  # Empty streams are always consistent; existing ones are from another time.
  if [[ -z $streams ]]; then unset 'places[streams]'; fi
  timed "checking $folder" backup_check "$folder"
  if [[ -z $force && ! -e $home/restoring ]]; then
    for name in nats postgres "${services[@]}"; do
      if process_running "$name"; then die "$name runs; ./dev down stops everything. --force does that, and replaces what is there"; fi
    done
    if restore_finds_something; then die "$home is in use: --force replaces everything in it with the backup"; fi
  fi
  if [[ ! -e $folder/master.key ]]; then
    missing=$(backup_keys_missing "$folder")
    if [[ -n $missing && -z $other ]]; then
      die "the backup has no keys, and those of $home are others: what is encrypted could not be read. Put them there, or go on without (--other-keys: then vendors' keys and secrets have to be given again). Missing: ${missing//$'\n'/, }"
    fi
  fi
  mesh_stop
  # While this file exists, nothing starts here.
  : >"$home/restoring"
  exit_run restore_stop
  for name in master secrets token; do
    if [[ -e $folder/$name.key ]]; then
      restore_keep_key "$folder/$name.key" "$home/$name.key"
      (umask 077 && cat -- "$folder/$name.key" >"$home/$name.key.new")
      mv -- "$home/$name.key.new" "$home/$name.key"
    fi
  done
  timed "starting PostgreSQL in $home" postgres_start durable
  if [[ -z $streams ]]; then rm -rf -- "$home/nats"; fi
  timed "restoring" backup_put "$folder"
  rm -f -- "$home/restoring"
  say "the backup of $(backup_value "$folder" made) is restored; ./dev up starts the mesh"
}

# Newer backups may need keys that an older one does not have.
restore_keep_key() {
  local kept
  if [[ ! -e $2 ]] || cmp -s -- "$1" "$2"; then return 0; fi
  kept=$home/backups/keys-$(date -u +%Y%m%dT%H%M%SZ)
  (umask 077 && mkdir -p -- "$kept" && cp -- "$2" "$kept/")
  note "the ${2##*/} that was there is kept in $kept"
}

restore_stop() { process_stop INT 20 postgres; }

restore_finds_something() {
  local folder
  if as_postgres test -s "$(postgres_folder)/data/PG_VERSION"; then return 0; fi
  for folder in "${places[@]}"; do
    if [[ -n $(ls -A -- "$folder" 2>/dev/null) ]]; then return 0; fi
  done
  return 1
}
