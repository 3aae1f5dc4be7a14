#!/bin/sh
# Runs trace-serve with every TRACE_SERVE_<NAME>_FILE read into TRACE_SERVE_<NAME>, so that a key comes from a mounted
# secret and stands in no image, compose file or `docker inspect`.
set -eu

for name in $(env | sed -n 's/^\(TRACE_SERVE_[A-Z_]*\)_FILE=.*/\1/p'); do
  file=$(printenv "${name}_FILE")
  if [ -n "$(printenv "$name" || true)" ]; then
    echo "error: $name and ${name}_FILE are both set; keep one" >&2
    exit 3
  fi
  if [ ! -r "$file" ]; then
    echo "error: ${name}_FILE: $file is not a readable file; mount the secret there" >&2
    exit 3
  fi
  value=$(cat "$file")
  export "$name=$value"
  unset "${name}_FILE"
done

exec trace-serve "$@"
