# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# Slack's own SDK for Python, the reference for our check of signatures.

# slack [--update]: compares the cases with the SDK's results; --update regenerates them. The SDK
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
  timed "checking signatures with Slack's SDK" as_caller "$folder/bin/python" -B scripts/slack/signature_cases.py "${arguments[@]}"
}
