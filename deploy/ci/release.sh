#!/usr/bin/env bash
# Builds a policy, gates it, checks the signed verdict, publishes both and deploys: the whole release, with nothing but a shell.
#
#   MODEL=models/base NAME=mine VERSION=7 KEY=gate.pem PUBLIC_KEY=gate.pub PUBLISH=/srv/policies deploy/ci/release.sh
#
# MODEL       model directory as it was trained
# NAME        name and directory of the policy
# VERSION     version of the policy
# KEY         private key that signs the verdict (`eval-gate keygen`)
# PUBLIC_KEY  the key that servers have pinned
# PUBLISH     directory that servers read policies from; the policy goes to NAME-VERSION below it, once
# WORK        where everything is made; a run that was interrupted goes on there (default: release)
# RECIPE, QUERIES, MARGIN         as of `policy build` and `eval-gate run` (default: default, support, 0.05)
# TRAINING, SERVING               arms, where they are not MODEL and the built policy: URLs of engines, for example
# TRAINING_KEY_ENV, SERVING_KEY_ENV   names of the variables with the keys of those URLs
# GATE_OPTIONS                    further options of `eval-gate run`, separated by blanks
# DEPLOY      command that is run with the published policy as its argument, such as `helm upgrade ...` in a script
#
# The exit code is the gate's: 0 released, 1 blocked, 2 inconclusive (nothing is published), 3 configuration, 4
# infrastructure, 130 interrupted.
set -euo pipefail

: "${MODEL:?model directory}" "${NAME:?name of the policy}" "${VERSION:?version of the policy}"
: "${KEY:?private key}" "${PUBLIC_KEY:?pinned public key}" "${PUBLISH:?directory of published policies}"
work=${WORK:-release}
policy=$work/$NAME
gate=$work/gate

say() { printf '== %s\n' "$*" >&2; }

build() {
  if [ -e "$policy" ]; then
    say "policy $policy is there already"
  else
    trace-serve policy build "$MODEL" --out "$policy" --name "$NAME" --version "$VERSION" --recipe "${RECIPE:-default}"
  fi
}

judge() {
  local options=()
  [ -z "${TRAINING_KEY_ENV:-}" ] || options+=("--training-key-env=$TRAINING_KEY_ENV")
  [ -z "${SERVING_KEY_ENV:-}" ] || options+=("--serving-key-env=$SERVING_KEY_ENV")
  # shellcheck disable=SC2206  # several options in one variable, as documented
  options+=(${GATE_OPTIONS:-})
  eval-gate run --training "${TRAINING:-$MODEL}" --serving "${SERVING:-$policy}" --queries "${QUERIES:-support}" \
    --margin "${MARGIN:-0.05}" --key "$KEY" --out "$gate" --resume ${options[@]+"${options[@]}"}
}

publish() {
  local target=$PUBLISH/$NAME-$VERSION candidate=$PUBLISH/$NAME-$VERSION
  mkdir -p "$PUBLISH"
  if [ ! -e "$target" ]; then
    candidate=$target.new
    rm -rf "$candidate"
    cp -R "$policy" "$candidate"
  fi
  # Judged where servers read it and by the key that they have pinned.
  eval-gate verify "$gate/verdict.dsse.json" --public-key "$PUBLIC_KEY" --policy "$candidate"
  [ "$candidate" = "$target" ] || mv "$candidate" "$target"
  cp "$gate/verdict.dsse.json" "$target.verdict.new"
  mv "$target.verdict.new" "$target.verdict.dsse.json"
}

mkdir -p "$work"
say "build $NAME $VERSION"
build
say "gate"
code=0
judge || code=$?
case $code in
  0) ;;
  1) say "blocked: the loss is larger than the margin; see $gate/report.html" && exit 1 ;;
  2) say "inconclusive: ask more queries or choose another margin; see $gate/report.html" && exit 2 ;;
  *) say "no verdict (exit code $code)" && exit "$code" ;;
esac
say "publish to $PUBLISH"
publish
if [ -n "${DEPLOY:-}" ]; then
  say "deploy"
  "$DEPLOY" "$PUBLISH/$NAME-$VERSION"
fi
say "released $NAME $VERSION"
