#!/usr/bin/env bash
# Start a real SLURM of two nodes on this host, for the tests; as root, on Debian or Ubuntu. Safe to call again.
#   tests/helpers/slurm/start.sh
set -euo pipefail

if sinfo --noheader >/dev/null 2>&1; then exit; fi
if ! command -v slurmctld >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null
fi

host=$(hostname -s)
mkdir -p /etc/slurm /run/munge /var/spool/slurmctld
grep -q "node1 node2" /etc/hosts || echo "127.0.0.1 node1 node2" >>/etc/hosts
getent hosts "$host" >/dev/null || echo "127.0.0.1 $host" >>/etc/hosts

# CPUs: so many jobs a node at a time, whatever the host has. cred_expire: seconds that a requeued job waits.
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
JobRequeue=1
ReturnToService=2
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd-%n.log
NodeName=node[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2
PartitionName=main Nodes=node[1-2] Default=YES State=UP
CONF

chown munge: /run/munge
pgrep -x munged >/dev/null || runuser -u munge -- /usr/sbin/munged
pgrep -x slurmctld >/dev/null || slurmctld -c
for node in node1 node2; do
  mkdir -p "/var/spool/slurmd-$node"
  pgrep -f "slurmd -N $node" >/dev/null || slurmd -N "$node"
done

for _ in $(seq 60); do
  if [[ $(sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | wc -l) == 2 ]]; then exit; fi
  sleep 0.5
done
echo "SLURM did not start; see /var/log/slurmctld.log" >&2
exit 1
