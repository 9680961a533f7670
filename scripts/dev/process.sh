# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# Background processes of a home: started in their own session, found through `run/<name>.pid`,
# stopped with a signal and then SIGKILL. A pid file has "<pid> <start time> <fingerprint>": a
# reused pid has another start time, so that a stale file never makes us signal an unrelated
# process.

# as_caller COMMAND...: runs a program for the caller, not for the home: with the caller's umask,
# and without our locks.
as_caller() { (umask "$caller_umask" && exec "$@" 8>&- 9>&-); }

# process_start NAME FINGERPRINT VARIABLE=VALUE... -- COMMAND...: the environment is exactly the
# given variables.
process_start() {
  local name=$1 fingerprint=$2 log=$home/logs/$1.log pid
  shift 2
  local -a variables=("DEV_PROCESS_MARK=$name@$home")
  while [[ $1 != -- ]]; do
    variables+=("$1")
    shift
  done
  shift
  process_log_rotate "$log"
  # The locks (8, 9) are closed: a daemon that inherited them would hold them for its lifetime.
  # setsid keeps a Ctrl-C for this script away from the daemon. Neither it nor `exec` forks here, so
  # that `$!` is the daemon's own pid. The environment is replaced without `env -i`, whose
  # arguments, including passwords, every user could read.
  (
    cd /
    exec </dev/null >>"$log" 2>&1 8>&- 9>&-
    for inherited in $(compgen -e); do unset "$inherited" 2>/dev/null || true; done
    export "${variables[@]}"
    # A socket passed to this script is for one process only; any other one that inherited it would
    # hold it open.
    if [[ -n ${LISTEN_FDS:-} ]]; then
      export LISTEN_PID=$BASHPID
    else
      for ((inherited = 3; inherited < 3 + sockets; inherited++)); do exec {inherited}>&-; done
    fi
    umask "$caller_umask"
    exec setsid "$@"
  ) &
  pid=$!
  disown "$pid"
  printf '%s %s %s\n' "$pid" "$(process_start_time "$pid" || echo 0)" "$fingerprint" >"$home/run/$name.pid.new"
  mv -- "$home/run/$name.pid.new" "$home/run/$name.pid"
}

# Prints the pid of NAME if it is alive, else fails.
process_pid() {
  local pid started start_time
  { read -r pid started _ <"$home/run/$1.pid"; } 2>/dev/null || return 1
  process_start_time_read "$pid" || return 1
  [[ $start_time == "$started" ]] || return 1
  printf '%s' "$pid"
}

process_running() { process_pid "$1" >/dev/null; }

# The fingerprint of NAME: its build and its settings.
process_fingerprint() {
  local fingerprint
  { read -r _ _ fingerprint <"$home/run/$1.pid"; } 2>/dev/null || return 1
  printf '%s' "$fingerprint"
}

# The start time of a living process, in clock ticks since boot. A zombie is dead: if nothing reaps
# orphans (a container without an init), it stays forever.
process_start_time() {
  local start_time
  process_start_time_read "$1" || return 1
  printf '%s' "$start_time"
}

# The same into `start_time`, without a subshell: some callers poll every second.
process_start_time_read() {
  local stat
  local -a fields
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  # The second field, the command in parentheses, may contain spaces; after the last parenthesis
  # comes the state.
  read -ra fields <<<"${stat##*) }"
  # A process that ends between opening and reading leaves nothing to read.
  ((${#fields[@]} >= 20)) || return 1
  [[ ${fields[0]} != [ZX] ]] || return 1
  start_time=${fields[19]}
}

# process_stop SIGNAL GRACE_SECONDS NAME...: signals all, waits, then kills the remaining ones with
# their child processes.
process_stop() {
  local signal=$1 grace=$2 name pid deadline
  shift 2
  for name in "$@"; do
    if pid=$(process_pid "$name"); then
      kill -s "$signal" -- "$pid" 2>/dev/null || true
    fi
  done
  deadline=$(($(now_ms) + grace * 1000))
  for name in "$@"; do
    while process_running "$name" && (($(now_ms) < deadline)); do sleep 0.05; done
    if pid=$(process_pid "$name"); then
      warn "$name did not stop within $grace s and is killed"
      kill -s KILL -- "-$pid" 2>/dev/null || kill -s KILL -- "$pid" 2>/dev/null || true
      while process_running "$name"; do sleep 0.05; done
    fi
    rm -f -- "$home/run/$name.pid"
    process_stop_orphans "$name"
  done
}

# Processes of NAME without a pid file: the home was deleted while they ran, or this script was
# killed at the wrong moment. They are recognized by a marker in their environment. Two servers on
# one data folder would destroy it.
process_stop_orphans() {
  local pid path waited=0
  local -a found=()
  mapfile -t found < <(grep -lzxF -- "DEV_PROCESS_MARK=$1@$home" /proc/[0-9]*/environ 2>/dev/null)
  for path in "${found[@]}"; do
    pid=${path#/proc/}
    pid=${pid%/environ}
    process_start_time "$pid" >/dev/null || continue
    note "stopping an orphaned $1 (pid $pid)"
    kill -s TERM -- "$pid" 2>/dev/null || true
    while process_start_time "$pid" >/dev/null && ((waited++ < 100)); do sleep 0.05; done
    kill -s KILL -- "$pid" 2>/dev/null || true
  done
}

# Logs are appended to. One larger than 20 MB moves to `.1`, so that there are at most two files per
# process.
process_log_rotate() {
  local size
  size=$(stat -c %s -- "$1" 2>/dev/null || echo 0)
  if ((size > 20000000)); then mv -f -- "$1" "$1.1"; fi
}

# port_open PORT: a program listens on it on this machine.
port_open() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# port_taken PORT: the same, or a connection of this machine to itself starts there, as it may with
# a port that the kernel assigns to clients. Closing connections (in other states than these two) do
# not matter.
port_taken() {
  local number
  printf -v number %04X "$1"
  port_open "$1" || grep -qE "^ *[0-9]+: (0100007F|00000000):$number [0-9A-F]+:[0-9A-F]+ 0[12] " /proc/net/tcp
}

# http_get [HOST:]PORT PATH: prints the body of a response with status 200, else fails with the
# output on stdout. The default host is this machine. No curl: a fresh machine may have none.
http_get() {
  local answer host=127.0.0.1
  if [[ $1 == *:* ]]; then host=${1%:*}; fi
  # shellcheck disable=SC2016 # The inner shell expands its own arguments.
  answer=$(timeout 3 bash -c '
    exec 3<>"/dev/tcp/$0/$1" || exit 1
    printf "GET %s HTTP/1.0\r\nHost: %s\r\n\r\n" "$2" "$0" >&3
    cat <&3' "$host" "${1##*:}" "$2" 2>/dev/null | tr -d '\r\0') || return 1
  printf '%s' "${answer#*$'\n\n'}"
  [[ ${answer%%$'\n'*} == HTTP/1.*' 200'* ]]
}
