#!/usr/bin/env bash
# One node of Slurm on this machine: slurm.sh start FOLDER, slurm.sh stop FOLDER. As root, after apt install slurm-wlm munge
set -euo pipefail
folder=$2
export SLURM_CONF=$folder/slurm.conf
if [ "$1" = start ]; then
  mkdir -p "$folder/state" "$folder/spool"
  cat >"$SLURM_CONF" <<END
ClusterName=tested
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=1
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=tested Nodes=ALL Default=YES State=UP
END
  if ! munge -n >/dev/null 2>&1; then
    mkdir -p /run/munge && chown munge: /run/munge
    runuser -u munge -- munged && touch "$folder/munged"
  fi
  slurmctld && slurmd
  for _ in $(seq 100); do
    [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && exit 0
    sleep 0.2
  done
  tail -n 20 "$folder"/*.log >&2
  exit 1
else
  for daemon in slurmd slurmctld; do
    [ -f "$folder/$daemon.pid" ] && kill "$(cat "$folder/$daemon.pid")"
  done
  if [ -f "$folder/munged" ]; then runuser -u munge -- munged --stop; fi
fi
