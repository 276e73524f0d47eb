#!/usr/bin/env bash
# deploy/backup.sh DEPLOYMENT DIR: copies ledger, bus, adapters and journals to DIR, which must not exist yet.
# Engines go on serving; nothing is decided meanwhile. DEPLOYMENT itself, the secrets, is not copied: keep it apart.
set -euo pipefail
deployment=${1:?DEPLOYMENT is missing} target=${2:?DIR is missing}
[ -s "$deployment/.env" ] || { echo "error: $deployment holds no .env: name the folder that kite init made" >&2; exit 1; }
deployment=$(realpath "$deployment") target=$(realpath -m "$target")
mkdir -m 700 "$target"
cd "$(dirname "$0")/.."
compose() { docker-compose --env-file "$deployment/.env" "$@"; }
owner=$(sed -n 's/^KITE_UID=//p' "$deployment/.env"):$(sed -n 's/^KITE_GID=//p' "$deployment/.env")

compose stop arbitrator nats
trap 'compose start nats arbitrator' EXIT
compose exec -T postgres pg_dump --username kite --format custom kite >"$target/ledger.dump"
compose run --rm -T --no-deps --user "$owner" --entrypoint tar volumes \
    -C /volumes -c bus adapters state-yoco state-upcycle state-guard >"$target/volumes.tar"
(cd "$target" && sha256sum ledger.dump volumes.tar >SHA256SUMS)
