#!/bin/sh
# Runs trace-serve with the keys read from the files that TRACE_SERVE_API_KEY_FILE and TRACE_SERVE_ADMIN_KEY_FILE name, so
# that a key comes from a mounted secret and stands in no image, compose file or `docker inspect`.
set -eu

for name in TRACE_SERVE_API_KEY TRACE_SERVE_ADMIN_KEY; do
  file=$(printenv "${name}_FILE" || true)
  [ -n "$file" ] || continue
  if [ -n "$(printenv "$name" || true)" ]; then
    echo "error: $name and ${name}_FILE are both set; keep one" >&2
    exit 3
  fi
  if [ ! -f "$file" ] || [ ! -r "$file" ]; then
    echo "error: ${name}_FILE: $file is not a readable file; mount the secret there" >&2
    exit 3
  fi
  value=$(cat "$file")
  export "$name=$value"
  unset "${name}_FILE"
done

exec trace-serve "$@"
