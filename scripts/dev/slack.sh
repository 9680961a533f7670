# shellcheck shell=bash disable=SC2154 # What the parts share is set in `dev` and in the parts it loads first.
# Slack's own SDK for Python, against which our check of signatures is held.

# slack [--update]: whether the cases are what the SDK says; --update writes them anew. The SDK
# comes from PyPI once.
slack_check() {
  local folder=$main_home/slack
  local -a arguments=(--check)
  case ${1:-} in
    '') ;;
    --update) arguments=() ;;
    *) die "usage: ./dev slack [--update]" ;;
  esac
  python_with "$folder" scripts/slack/requirements.txt "Slack's SDK"
  timed "asking Slack's SDK about signatures" as_caller "$folder/bin/python" -B scripts/slack/signature_cases.py "${arguments[@]}"
}
