#!/usr/bin/env bash
# Four workers on each of two hosts, with Open MPI. Give other hosts as the first argument.
#   deploy/mpi/train.sh node1:4,node2:4
set -euo pipefail

hosts=${1:-node1:4,node2:4}
export OUTPUT_DIR=${OUTPUT_DIR:-$PWD/output} # on storage that all hosts share
export TFDIST_SECRET_FILE=${TFDIST_SECRET_FILE:-$PWD/secret} # openssl rand -hex 32 > secret; chmod 600 secret

exec mpirun -H "$hosts" -x PATH -x OUTPUT_DIR -x TFDIST_SECRET_FILE \
    tfdist run --mpi "$hosts" --log-dir "$OUTPUT_DIR/logs" train.py
