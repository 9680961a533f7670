# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# Output for the person at the terminal. Progress goes to stderr, so that the stdout of a command (a
# JSON object of a benchmark, a status table) can be piped.

if [[ -t 2 && -z ${NO_COLOR:-} ]]; then
  tone_head=$'\e[1;36m' tone_bad=$'\e[1;31m' tone_warn=$'\e[33m' tone_dim=$'\e[2m' tone_off=$'\e[0m'
else
  tone_head='' tone_bad='' tone_warn='' tone_dim='' tone_off=''
fi

# A new phase of the work.
say() { printf '%s==>%s %s\n' "$tone_head" "$tone_off" "$*" >&2; }
# A detail of the current phase.
note() { printf '    %s\n' "$*" >&2; }
warn() { printf '%swarning:%s %s\n' "$tone_warn" "$tone_off" "$*" >&2; }

# Prints an error and ends the script.
die() {
  printf '%serror:%s %s\n' "$tone_bad" "$tone_off" "$*" >&2
  exit 1
}

# The clock in milliseconds, without starting a process.
now_ms() {
  local micros=${EPOCHREALTIME/[.,]/}
  printf '%s' "$((micros / 1000))"
}

# Runs a command (a function or a program) as one phase and prints its duration. The command must
# report failure by its exit code through `die` or by ending the script: `set -e` stays in force
# inside.
timed() {
  local title=$1 began
  shift
  say "$title"
  began=$(now_ms)
  "$@"
  took "$began"
}

# Prints the time since `now_ms` returned $1.
took() {
  local ms=$(($(now_ms) - $1))
  printf '    %s%d.%d s%s\n' "$tone_dim" "$((ms / 1000))" "$((ms % 1000 / 100))" "$tone_off" >&2
}

# Prints the end of a log file, indented, to explain a failure.
show_tail() {
  if [[ -s $1 ]]; then
    printf '    the end of %s:\n' "$1" >&2
    tail -n 20 -- "$1" | sed 's/^/    | /' >&2
  else
    note "$1 is empty"
  fi
}

# `exit_run 'function arguments'`: registers a clean-up for the end of this script, however it ends.
# They run in reverse order.
exit_commands=()
exit_run() {
  if ((${#exit_commands[@]} == 0)); then
    trap exit_all EXIT
    # Not every version of bash runs the EXIT trap when a signal ends the shell. PIPE: `./dev demo |
    # head`.
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    trap 'exit 141' PIPE
  fi
  exit_commands+=("$1")
}

exit_all() {
  local status=$? index
  trap - EXIT
  # Neither a second Ctrl-C during the clean-up nor a closed terminal may leave processes behind.
  trap '' INT TERM HUP PIPE
  for ((index = ${#exit_commands[@]} - 1; index >= 0; index--)); do
    ${exit_commands[index]} || warn "clean-up did not succeed: ${exit_commands[index]}"
  done
  exit "$status"
}
