#!/usr/bin/env bash
# deploy/restore.sh DEPLOYMENT DIR: fills the empty volumes of a deployment with what deploy/backup.sh wrote to DIR.
# DEPLOYMENT is the folder of the fleet that was backed up. Bring the fleet up afterwards as always.
set -euo pipefail
deployment=${1:?DEPLOYMENT is missing} source=${2:?DIR is missing}
[ -s "$deployment/.env" ] || { echo "error: $deployment holds no .env: name the folder that kite init made" >&2; exit 1; }
deployment=$(realpath "$deployment") source=$(realpath "$source")
(cd "$source" && sha256sum --quiet --check SHA256SUMS)
cd "$(dirname "$0")/.."
compose() { docker-compose --env-file "$deployment/.env" "$@"; }
owner=$(sed -n 's/^KITE_UID=//p' "$deployment/.env"):$(sed -n 's/^KITE_GID=//p' "$deployment/.env")
volumes() { compose run --rm -T --no-deps --user "$owner" --entrypoint "$1" volumes "${@:2}"; }

compose run --rm -T --no-deps volumes
volumes sh -c '[ -z "$(ls -A /volumes/bus /volumes/adapters | grep -v :)" ]' ||
    { echo "error: the volumes hold something: docker-compose down -v removes them" >&2; exit 1; }
volumes tar -C /volumes --no-overwrite-dir -x <"$source/volumes.tar"
compose up -d postgres
until compose exec -T postgres pg_isready --quiet --host 127.0.0.1 --username kite --dbname kite; do sleep 1; done
compose exec -T postgres pg_restore --username kite --dbname kite --exit-on-error --single-transaction <"$source/ledger.dump"
