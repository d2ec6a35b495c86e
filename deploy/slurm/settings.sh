# What the prolog, the epilog and the task prolog of this folder go by: copy to /etc/holdfast/slurm.sh, owned by root and
# readable by all. Every line is optional; what is commented out shows the default.

# The unit that the prolog starts on a node where ckptd does not answer. Empty: it starts none.
#start_unit=
# What the prolog does when ckptd does not answer in time. no: it says so in the system's log, and the job runs. yes: it
# fails, by which Slurm drains the node and gives the job another one.
#required=no
# How long the prolog waits for ckptd, and the epilog for what it reports, in seconds.
#deadline_s=30
# Where ckptd listens, if not at the default places: for jobs, and for ckptctl.
#client_socket=
#admin_socket=
