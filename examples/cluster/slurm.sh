#!/bin/bash
# sbatch examples/cluster/slurm.sh config.yaml observe.dir=/shared/runs/first [key=value ...]
#SBATCH --job-name=trimtab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS=$address:6379

# Ray on every node, as long as the job: the first is the head.
srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --node-ip-address="$address" --port=6379 --block &
until srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" ray health-check --address="$RAY_ADDRESS"; do sleep 2; done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
    ray start --address="$RAY_ADDRESS" --block &
fi
alive() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" ray list nodes --filter state=ALIVE --format=json | grep -c '"node_id"'; }
until [ "$(alive)" -ge "$SLURM_JOB_NUM_NODES" ]; do sleep 2; done

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" trimtab train --resume "$@"
