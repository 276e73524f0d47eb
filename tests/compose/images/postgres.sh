#!/usr/bin/env bash
# The part of the official image's entrypoint that is needed here: a new database cluster has the user and the database
# that POSTGRES_USER and POSTGRES_DB name, with the password in the file POSTGRES_PASSWORD_FILE.
set -euo pipefail
# initdb wants the user to have a name.
export NSS_WRAPPER_PASSWD=/tmp/passwd NSS_WRAPPER_GROUP=/tmp/group LD_PRELOAD=libnss_wrapper.so
echo "postgres:x:$(id -u):$(id -g):PostgreSQL:/tmp:/bin/false" >"$NSS_WRAPPER_PASSWD"
echo "postgres:x:$(id -g):" >"$NSS_WRAPPER_GROUP"
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    [ -s "$POSTGRES_PASSWORD_FILE" ] || { echo "error: $POSTGRES_PASSWORD_FILE holds no password" >&2; exit 1; }
    # shellcheck disable=SC2086 # several words
    initdb --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth-local=trust --auth-host=scram-sha-256 \
        $POSTGRES_INITDB_ARGS -D "$PGDATA"
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    pg_ctl -D "$PGDATA" -o "-c listen_addresses=''" -w start
    createdb --username="$POSTGRES_USER" --maintenance-db=postgres "$POSTGRES_DB"
    pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec "$@" -c listen_addresses='*'
