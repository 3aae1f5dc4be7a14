#!/bin/sh
# report_outcome.sh NAME COMMAND [ARGUMENT...]: runs a command whose exit code is a decision, and leaves the decision where
# outcome_server.py offers it to the analysis.
#
# Argo knows of a job only that it succeeded or failed, so the third answer takes this way round: 0 and 2 end the job
# well, and the analysis reads PASS or INCONCLUSIVE from the server; 1 and everything else fail the job, which aborts.
set -eu

outcomes=${OUTCOMES:?the directory that outcome_server.py serves}
name=$1
shift

# What an earlier run of the same revision left must not decide this one.
rm -f "$outcomes/$name.json"

code=0
"$@" || code=$?
case $code in
  0) outcome=PASS ;;
  2) outcome=INCONCLUSIVE ;;
  *) exit "$code" ;;
esac
printf '{"outcome": "%s"}\n' "$outcome" > "$outcomes/.$name.new"
mv "$outcomes/.$name.new" "$outcomes/$name.json"
