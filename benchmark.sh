#!/usr/bin/env bash
# Sweeps: every combination of environments and seeds as one run, on this machine or on a Slurm cluster.
#
#   ./benchmark.sh ppo_mlp_gaussian.py --env-ids HalfCheetah-v5 Hopper-v5 --seeds 5 -- --total-timesteps 1000000
#   ./benchmark.sh base             a suite: the runs behind one table of docs/
#   ./benchmark.sh base --keep      its finished runs as small copies in results/runs/base, its table and its figure
#
#   --env-ids ID...         the environments              --seeds N      seeds 1 to N (default 1)
#   --runs DIR              where the runs are kept (default runs)
#   --workers N             runs side by side, cores and GPUs shared out among them (default: one run a core)
#   --dry-run               print the commands, and where each run stands, and do nothing
#   --launcher local|slurm  here (default), or as one job array of a Slurm cluster; --workers then limits how many run at
#                           once, and --time --partition --gpus --cpus-per-task --mem --account go to sbatch
#   -- FLAGS                go to the script
#
# A run is its directory, RUNS/{env_id}__{script}__{hash of the flags}__{seed}; its log is beside it. Started again, the
# same command skips what is finished (or diverged), resumes what was stopped, and tries again what failed. Ctrl-C stops
# every run after saving it. The exit code is 0 when every run has ended, 1 when one failed. PYTHON names the Python.
set -euo pipefail

here=$(dirname "$0")/ here=${here#./}
python=${PYTHON:-python}
if [[ -z ${PYTHON:-} && -x ${here}.venv/bin/python ]]; then python=${here}.venv/bin/python; fi

die() {
  echo "benchmark.sh: $*" >&2
  exit 2
}
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) || die "needs Bash 5.1 or newer" # macOS has 3.2

directories=() fresh=() resumed=() # of each run: where it is, and the commands that begin it and go on with it

# sweep SCRIPT "ENV_ID..." SEEDS FLAG...: adds a run for each environment and seed. The hash in its name is of the flags
# in one order and one spelling: --norm_obs --gamma=0.9 is the run of --gamma 0.9 --norm-obs.
sweep() {
  local script=$1 ids=$2 last=$3 env_id seed name variant command quoted=""
  shift 3
  if (($#)); then quoted=$(printf ' %q' "$@"); fi
  variant=$(basename "$script" .py)__$(
    sed -e :a -e 's/^\(--[^ =]*\)_/\1-/' -e ta -e 's/^\(--[^ =]*\)=/\1 /' <<<"${quoted// --/$'\n'--}" |
      LC_ALL=C sort | { sha1sum 2>/dev/null || shasum; } | cut -c 1-8
  )
  printf -v command '%q %q' "$python" "$script"
  for env_id in $ids; do
    for ((seed = 1; seed <= last; seed++)); do
      name=${env_id}__${variant}__$seed
      directories+=("$runs/${name//[\/:]/-}")
      fresh+=("$command$(printf ' --env-id %q --seed %q --run-dir %q' "$env_id" "$seed" "${directories[-1]}")$quoted")
      resumed+=("$command$(printf ' --resume %q' "${directories[-1]}")") # its checkpoint has its flags
    done
  done
}

# The suites: the runs behind the tables of docs/.
h1="h1-walk-v0 h1-stand-v0 h1-run-v0 h1-sit_simple-v0 h1-sit_hard-v0 h1-crawl-v0 h1-reach-v0 h1-hurdle-v0 h1-pole-v0"
h1+=" h1-stair-v0 h1-balance_simple-v0 h1-balance_hard-v0 h1-maze-v0 h1-slide-v0"
suites="base base-report comb value-first value-first-norm value-first-shared value-first-support kl-post kl-objectives recurrent recurrent-memory recurrent-hand humanoid-4m h1 h1hand interleaved-settings interleaved interleaved-ablations"
suite() {
  case $1 in
    base)
      sweep "${here}ppo_mlp_gaussian.py" "HalfCheetah-v5 Hopper-v5 Walker2d-v5" 10 --compile
      sweep "${here}ppo_mlp_gaussian.py" HalfCheetah-v5 10 --exp-name ppo_mlp_gaussian_tuned --compile \
        --gamma 0.98 --gae-lambda 0.92 --fixed-std 0.15 --no-clip-vloss
      ;;
    base-report) # the course report's tasks
      local short=(--total-timesteps 100000 --eval-episodes 100)
      sweep "${here}ppo_mlp_gaussian.py" InvertedPendulum-v5 5 "${short[@]}"
      sweep "${here}ppo_mlp_gaussian.py" Reacher-v5 5 "${short[@]}" \
        --fixed-std 0.1 --scale-actions --learning-rate 1e-3 --gamma 0.9 --no-clip-vloss
      sweep "${here}ppo_mlp_gaussian.py" Pendulum-v1 5 "${short[@]}" \
        --scale-actions --learning-rate 1e-3 --gamma 0.9 --no-clip-vloss \
        --num-envs 4 --num-steps 1024 --num-minibatches 64 --no-norm-obs --no-norm-reward
      ;;
    comb)
      local walkers="HalfCheetah-v5 Hopper-v5 Walker2d-v5"
      sweep "${here}ppo_comb_dist.py" "$walkers" 3 --compile
      sweep "${here}ppo_comb_dist.py" "$walkers" 3 --compile --density as-coded
      sweep "${here}ppo_mlp_gaussian.py" "$walkers" 10 --compile
      ;;
    value-first)
      local order mujoco=(--total-timesteps 1000000 --num-envs 8 --num-steps 256 --num-minibatches 32
        --update-epochs 10 --learning-rate 3e-4 --ent-coef 0 --norm-obs --norm-reward --compile)
      for order in joint phases value-first; do
        sweep "${here}ppo_value_first.py" "CartPole-v1 Acrobot-v1 MountainCar-v0" 10 --order "$order"
        sweep "${here}ppo_value_first.py" "HalfCheetah-v5 Hopper-v5 Walker2d-v5" 3 --order "$order" "${mujoco[@]}"
      done
      ;;
    value-first-norm) # rewards divided by the returns' standard deviation; phases would be joint once more
      local order
      for order in joint value-first; do
        sweep "${here}ppo_value_first.py" "CartPole-v1 Acrobot-v1" 10 --order "$order" --norm-reward
      done
      ;;
    value-first-shared) # CleanRL's update
      local order
      for order in joint phases value-first; do
        sweep "${here}ppo_value_first.py" "CartPole-v1 Acrobot-v1" 10 --order "$order" --shared-update
      done
      ;;
    value-first-support)
      local order support
      for order in joint value-first; do
        for support in "" "--support-min -50 --support-max 50 --support-atoms 101"; do
          # shellcheck disable=SC2086  # the support is several words, or none
          sweep "${here}ppo_value_first.py" "CartPole-v1 Acrobot-v1" 5 --order "$order" --critic support $support
        done
      done
      ;;
    kl-post) # "AI Gym Workout": budgets for about as many episodes as the post's, as far as two cores carry
      local kl=${here}ppo_kl_adaptive.py
      sweep "$kl" "HalfCheetah-v5 Swimmer-v5 Reacher-v5" 3 --total-timesteps 3000000
      sweep "$kl" HalfCheetah-v5 3 --total-timesteps 3000000 --bootstrap-time-limit
      sweep "$kl" InvertedPendulum-v5 3 --total-timesteps 1000000
      sweep "$kl" InvertedDoublePendulum-v5 3 --total-timesteps 5000000
      sweep "$kl" Hopper-v5 3 --total-timesteps 6000000
      sweep "$kl" Walker2d-v5 1 --total-timesteps 5000000
      sweep "$kl" Ant-v5 1 --total-timesteps 2000000
      # Shorter, as their policies have 4 M weights, 140 times HalfCheetah's, and 20 passes over each batch.
      sweep "$kl" "Humanoid-v5 HumanoidStandup-v5" 1 --total-timesteps 500000
      ;;
    kl-objectives) # Table 1 of the PPO paper
      local value tasks="HalfCheetah-v5 Hopper-v5 InvertedDoublePendulum-v5 InvertedPendulum-v5 Reacher-v5 Swimmer-v5"
      local table=("${here}ppo_kl_adaptive.py" "$tasks Walker2d-v5") paper=(--preset paper --compile)
      sweep "${table[@]}" 3 "${paper[@]}" --objective none
      sweep "${table[@]}" 3 "${paper[@]}" --objective clip --clip-coef 0.2
      sweep "${table[@]}" 3 "${paper[@]}" --objective kl-adaptive --kl-targ 0.01
      sweep "${table[@]}" 3 "${paper[@]}" --objective kl-fixed --beta 1
      for value in 0.1 0.3; do sweep "${table[@]}" 1 "${paper[@]}" --objective clip --clip-coef "$value"; done
      for value in 0.003 0.03; do sweep "${table[@]}" 1 "${paper[@]}" --objective kl-adaptive --kl-targ "$value"; done
      for value in 0.3 3 10; do sweep "${table[@]}" 1 "${paper[@]}" --objective kl-fixed --beta "$value"; done
      ;;
    recurrent)
      local cell masked=(--mask-velocity --total-timesteps 150000 --num-envs 16 --num-steps 64 --update-epochs 10
        --learning-rate 1e-3 --clip-coef 0.2 --ent-coef 0 --no-clip-vloss --norm-reward --eval-episodes 100)
      for cell in lstm gru; do
        sweep "${here}ppo_lstm_atari.py" PongNoFrameskip-v4 1 --rnn "$cell" --total-timesteps 3000000 --eval-episodes 30
        sweep "${here}ppo_lstm_atari.py" "BreakoutNoFrameskip-v4 BeamRiderNoFrameskip-v4" 1 --rnn "$cell" \
          --total-timesteps 1000000 --eval-episodes 30
        sweep "${here}ppo_lstm_atari.py" CartPole-v1 10 --rnn "$cell" "${masked[@]}"
      done
      ;;
    recurrent-memory) # hidden velocities: both cells, a memory that forgets, and the base with and without velocities
      local recurrent=${here}ppo_lstm_atari.py novel=results.memory_tasks: setting=(--update-epochs 10 --clip-coef 0.2
        --ent-coef 0 --learning-rate 1e-3 --norm-obs --norm-reward --mask-velocity)
      local pendulum=("${setting[@]}" --total-timesteps 100000 --num-envs 16 --num-steps 256 --num-minibatches 16
        --gamma 0.9 --no-clip-vloss --eval-episodes 100)
      sweep "$recurrent" Pendulum-v1 5 "${pendulum[@]}"
      sweep "$recurrent" Pendulum-v1 5 "${pendulum[@]}" --rnn gru
      sweep "${here}results/memory_tasks.py" Pendulum-v1 5 "${pendulum[@]}" --exp-name forgetful
      sweep "$recurrent" "Hopper-v5 Ant-v5" 3 "${setting[@]}" --total-timesteps 1000000 --num-envs 64 --num-steps 32 \
        --num-minibatches 8
      sweep "${here}ppo_mlp_gaussian.py" "Hopper-v5 Ant-v5 ${novel}Hopper-NoVel-v5 ${novel}Ant-NoVel-v5" 3 --compile
      ;;
    recurrent-hand) # Gymnasium-Robotics' Shadow hand: does a memory help, and does it adapt to other dynamics?
      local task=gymnasium_robotics:HandReachDense-v3 setting=(--total-timesteps 1500000 --num-envs 64
        --num-steps 32 --num-minibatches 8 --update-epochs 10 --learning-rate 3e-4 --gamma 0.8 --clip-coef 0.2
        --ent-coef 0 --norm-obs --norm-reward --eval-episodes 100)
      sweep "${here}ppo_lstm_atari.py" "$task" 3 "${setting[@]}"
      sweep "${here}ppo_lstm_atari.py" "$task" 3 "${setting[@]}" --randomise
      sweep "${here}results/memory_tasks.py" "$task" 3 "${setting[@]}" --exp-name forgetful --randomise
      sweep "${here}ppo_mlp_gaussian.py" "$task" 3 "${setting[@]}"
      ;;
    humanoid-4m) # v4, as the published curves: v5 also charges for contact forces
      sweep "${here}ppo_interleaved_gru_beta.py" Humanoid-v4 3 --total-timesteps 4000000 --compile --init-std 0.3 \
        --gamma 0.99 --eval-interval 122
      ;;
    h1) # HumanoidBench without hands, one setting for all; where half of the episodes fall, ten say little
      sweep "${here}ppo_interleaved_gru_beta.py" "$h1" 2 --total-timesteps 2000000 --eval-episodes 50 --compile
      ;;
    h1hand)
      local flagship=${here}ppo_interleaved_gru_beta.py
      sweep "$flagship" "h1hand-sit_hard-v0 h1hand-bookshelf_simple-v0 h1hand-truck-v0" 1 --total-timesteps 5000000 \
        --compile
      sweep "$flagship" h1hand-walk-v0 1 --total-timesteps 6000000 --compile
      ;;
    interleaved-settings) # h1 with a smaller discount, and with a smaller lambda too; humanoid-4m with that lambda
      local flagship=${here}ppo_interleaved_gru_beta.py budget=(--gamma 0.99 --compile --total-timesteps)
      sweep "$flagship" "${h1/h1-sit_hard-v0 /}" 1 "${budget[@]}" 2000000 --eval-episodes 50
      sweep "$flagship" h1-sit_hard-v0 2 "${budget[@]}" 2000000 --eval-episodes 50
      budget=(--gae-lambda 0.9 "${budget[@]}")
      sweep "$flagship" Humanoid-v4 3 "${budget[@]}" 4000000 --init-std 0.3 --eval-interval 122
      sweep "$flagship" "h1-walk-v0 h1-stand-v0 h1-crawl-v0 h1-sit_hard-v0" 1 "${budget[@]}" 2000000 --eval-episodes 50
      sweep "$flagship" "h1-run-v0 h1-sit_simple-v0 h1-hurdle-v0 h1-pole-v0 h1-stair-v0 h1-balance_simple-v0 h1-maze-v0" 1 \
        "${budget[@]}" 2000000 --eval-episodes 50 --lying-steps 0
      ;;
    interleaved) # the flagship as it was first: four large steps an iteration
      local flagship=${here}ppo_interleaved_gru_beta.py base=${here}ppo_mlp_gaussian.py value
      local first=(--update-epochs 2 --num-minibatches 2 --gamma 0.995 --init-gamma 0.995 --gae-lambda 0.95
        --learning-rate)
      sweep "$flagship" h1hand-walk-v0 3 "${first[@]}" 1e-3 --vf-coef 0.3
      sweep "$flagship" "h1hand-sit_hard-v0 h1hand-bookshelf_simple-v0 h1hand-truck-v0" 1 "${first[@]}" 1e-3 \
        --total-timesteps 2000000 --vf-coef 0.3
      # the first arm of the ablations, for twice as long
      sweep "$flagship" h1-walk-v0 3 "${first[@]}" 2e-3 --total-timesteps 2000000 --no-anneal-lr --vf-coef 0.3
      for value in 0.3 2 5; do
        sweep "$flagship" Humanoid-v5 3 "${first[@]}" 1e-3 --total-timesteps 1000000 --vf-coef "$value"
      done
      # the base as it is, and in the setting of HumanoidBench's own PPO
      sweep "$base" h1hand-walk-v0 1 --total-timesteps 1000000
      sweep "$base" h1hand-walk-v0 1 --exp-name humanoidbench_ppo --total-timesteps 1000000 --num-envs 4 \
        --num-steps 2048 --num-minibatches 16 --learning-rate 3e-5 --no-anneal-lr --no-norm-obs --no-norm-reward \
        --no-clip-vloss --vf-coef 1
      ;;
    interleaved-ablations) # what it was made of then, and what it makes of the benchmark's tasks
      local part first=(--update-epochs 2 --num-minibatches 2 --gamma 0.995 --init-gamma 0.995 --gae-lambda 0.95
        --learning-rate)
      for part in "" "--vf-coef 0.3" "--vf-coef 0.3 --window 1" "--vf-coef 0.3 --no-interleave" \
        "--vf-coef 0.3 --state-coef 0" "--vf-coef 0.3 --separate-critic" "--vf-coef 0.3 --beta-head alpha" \
        "--vf-coef 0.3 --no-pose-actions"; do
        # shellcheck disable=SC2086  # a part is several words, or none
        sweep "${here}ppo_interleaved_gru_beta.py" h1-walk-v0 3 "${first[@]}" 2e-3 --total-timesteps 1000000 \
          --no-anneal-lr $part
      done
      # the base's Gaussian in the flagship's setting: its noise of 0.15 in actions from -1 to 1, its weight of the value
      sweep "${here}ppo_mlp_gaussian.py" results.pose_tasks:h1-walk-pose-v0 3 --total-timesteps 1000000 --num-envs 32 \
        --num-steps 64 --num-minibatches 2 --update-epochs 2 --learning-rate 2e-3 --no-anneal-lr --gamma 0.995 \
        --max-grad-norm 3.5 --no-clip-vloss --vf-coef 0.6 --fixed-std 0.075
      ;;
    *) die "no suite '$1' (nor a script, which ends in .py); the suites: $suites" ;;
  esac
}

# finished, diverged, stopped (it has a checkpoint) or new
state() {
  if grep -osm 1 '"status": "[a-z]*"' "${directories[$1]}/result.json" | cut -d '"' -f 4; then return; fi
  if [[ -f ${directories[$1]}/checkpoint.pt ]]; then echo stopped; else echo new; fi
}

command_of() {
  if [[ $(state "$1") == stopped ]]; then echo "${resumed[$1]}"; else echo "${fresh[$1]}"; fi
}

# become RUN [GPU [CORES]]: becomes the run, on these or on all there are, with its output in its log.
become() {
  local log=${directories[$1]}.log pin=()
  exec 9>>"$log" >>"$log" 2>&1
  # Code 1: locked. Where locks don't work (some network file systems) or flock is missing (macOS), a run is started.
  flock -w 10 9 2>/dev/null || (($? != 1)) || die "another process works at this run"
  if [[ -n ${2:-} ]]; then export CUDA_VISIBLE_DEVICES=$2; fi
  if [[ -n ${3:-} ]] && command -v taskset >/dev/null; then pin=(taskset -c "$3"); fi
  command_of "$1"
  exec "${pin[@]}" bash -c "exec $(command_of "$1")"
}

# Why a run failed, from its log: an error box from its top (further down it is help), else the last line.
reason() {
  awk 'NF { last = $0 } /^╭/ { box = ""; n = 0 } n++ < 12 { box = box "    " $0 "\n" }
    END { printf "%s", last ~ /^╰/ ? box : "    " last "\n" }' "${directories[$1]}.log"
}

# On a terminal the counts stay at the bottom, and below them how far each run is, by the last line of its log. Elsewhere
# there is one line for each run that ended.
finished=0 diverged=0 failed=() shown=0
report() {
  local line="${#directories[@]} runs: $finished finished, ${#running[@]} running, ${#failed[@]} failed" i
  if ((diverged)); then line+=", $diverged diverged"; fi
  if [[ -t 1 ]]; then
    if ((shown)); then printf '\033[%dA' "$shown"; fi
    printf '\033[J%s%s\n' "${1:+$1$'\n'}" "$line"
    shown=1
    for i in "${running[@]:0:20}"; do
      line="  $(tail -n 1 "${directories[i]}.log" 2>/dev/null)  $(basename "${directories[i]}")"
      echo "${line:0:${COLUMNS:-80}-1}"
      shown=$((shown + 1))
    done
  elif [[ -n ${1:-} ]]; then
    echo "$1 ($line)"
  fi
}

# Waits until a run ends (or a signal comes, or on a terminal five seconds are over), and counts those that have ended.
running=() slot_of=() # by process
await_one() {
  local pid code i
  if [[ -t 1 ]] && ! kill -0 "${clock:-none}" 2>/dev/null; then
    sleep 5 >/dev/null 2>&1 &
    clock=$!
  fi
  wait -n || true
  for pid in "${!running[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then continue; fi
    code=0 i=${running[$pid]}
    wait "$pid" 2>/dev/null || code=$?
    free+=("${slot_of[$pid]}")
    unset "running[$pid]"
    case $(state "$i") in
      finished) finished=$((finished + 1)) && report "finished ${directories[i]}" ;;
      diverged) diverged=$((diverged + 1)) && report "diverged ${directories[i]}" ;;
      *) if ((!stopped)); then failed+=("$i") && report "failed ${directories[i]} (exit code $code)"; fi ;;
    esac
  done
  report
}

stop() {
  stopped=$1
  if ((${#running[@]})); then kill -TERM "${!running[@]}" 2>/dev/null || true; fi
}

run_here() {
  local affinity cores gpus i slot mine k quota period
  affinity='sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())'
  mapfile -t cores < <("$python" -c "import os; print(*($affinity), sep='\n')")
  ((${#cores[@]})) || die "$python can't be run; PYTHON names the Python"
  IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-$(nvidia-smi -L 2>/dev/null |
    sed -n 's/^GPU \([0-9]*\):.*/\1/p' | tr '\n' ,)}"
  ((${#gpus[@]})) || gpus=("")
  read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max || quota=max # a container's share of the cores
  if [[ $quota == max ]] || ((quota > ${#cores[@]} * period)); then quota=${#cores[@]} period=1; fi
  workers=${workers:-$((quota < period ? 1 : quota / period))}
  if ((workers > ${#todo[@]})); then workers=${#todo[@]}; fi # fewer runs have more cores each
  stopped=0
  trap 'stop 130' INT
  trap 'stop 143' TERM
  free=()
  for ((slot = 0; slot < workers; slot++)); do free+=("$slot"); done
  report
  for i in "${todo[@]}"; do
    while ((!${#free[@]} && !stopped)); do await_one; done
    if ((stopped)); then break; fi
    slot=${free[0]} free=("${free[@]:1}")
    mine=""
    for ((k = slot % ${#cores[@]}; k < ${#cores[@]}; k += workers)); do mine+=,${cores[k]}; done
    become "$i" "${gpus[slot % ${#gpus[@]}]}" "${mine#,}" &
    running[$!]=$i slot_of[$!]=$slot
    if ((stopped)); then kill -TERM $! 2>/dev/null || true; fi # the signal came before it was noted
    report
  done
  while ((${#running[@]})); do await_one; done
  for i in "${failed[@]}"; do
    printf '\nfailed: %s\n' "$(command_of "$i")"
    reason "$i"
  done
  if ((stopped)); then echo "stopped; the same command goes on" && exit "$stopped"; fi
  if ((${#failed[@]})); then exit 1; fi
}

# One job array for every run that has not ended. Slurm keeps the batch script that it is given, here the list of runs
# and what works at it, so that no later change of this file matters. It sends that script a USR1 two minutes before the
# time is up or when the job is preempted, and a TERM when it is cancelled.
run_on_slurm() {
  command -v sbatch >/dev/null || die "--launcher slurm: there is no sbatch here"
  {
    echo "#!/usr/bin/env bash"
    declare -p directories fresh resumed
    declare -f die state command_of become reason run_task
    echo "set -euo pipefail; run_task"
  } | sbatch --requeue --open-mode=append --signal=B:USR1@120 --job-name="$what" \
    --array="$(IFS=, && echo "${todo[*]}")${workers:+%$workers}" --output="$runs/slurm-%A_%a.log" "${slurm[@]}" ||
    die "sbatch took no job"
}

# One task of that array: the run, until it ends, or Slurm wants the machine back: then it is queued again and resumes.
run_task() {
  local i=$SLURM_ARRAY_TASK_ID pid code=0
  case $(state "$i") in finished | diverged) return ;; esac
  stopped=0
  trap 'stopped=1; kill -TERM "$pid"' USR1
  trap 'kill -TERM "$pid"' TERM
  become "$i" &
  pid=$!
  wait "$pid" || code=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || code=$?; done # a signal ends a wait before the run does
  case $(state "$i") in finished | diverged) return ;; esac
  if ((stopped)); then
    echo "stopped by Slurm: queued again"
    trap '' TERM USR1 # a TERM comes with the requeue
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$i"
  fi
  reason "$i"
  exit "$code"
}

ids=() number_of_seeds="" given=() runs=runs workers="" launcher=local slurm=() dry_run="" keep=""
if (($# == 0)) || [[ $1 == -h || " $* " == *" --help "* ]]; then sed -n '2,/^set /s/^# \{0,1\}//p' "$0" && exit; fi
what=$1
shift
while (($#)); do
  if [[ $1 == --?*=* ]]; then set -- "${1%%=*}" "${1#*=}" "${@:2}"; fi
  case $1 in
    --env-ids)
      [[ -n ${2:-} && $2 != --* ]] || die "--env-ids names no environment"
      while (($# > 1)) && [[ $2 != --* ]]; do
        if [[ " ${ids[*]} " != *" $2 "* ]]; then ids+=("$2"); fi
        shift
      done
      ;;
    --seeds | --runs | --workers | --launcher | --time | --partition | --gpus | --cpus-per-task | --mem | --account)
      [[ -n ${2:-} && $2 != --* ]] || die "$1 needs a value"
      case $1 in
        --seeds) number_of_seeds=$2 ;;
        --runs) runs=$2 ;;
        --workers) workers=$2 ;;
        --launcher) launcher=$2 ;;
        *) slurm+=("$1=$2") ;;
      esac
      shift
      ;;
    --dry-run) dry_run=yes ;;
    --keep) keep=yes ;;
    --) given=("${@:2}") && break ;;
    [0-9]*) die "unknown argument $1 (--seeds takes one number, a count: 3 for the seeds 1 2 3)" ;;
    *) die "unknown argument $1 (flags of the script come after --)" ;;
  esac
  shift
done
for number in ${number_of_seeds:+"$number_of_seeds"} ${workers:+"$workers"}; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || die "$number: --seeds and --workers take a whole number from 1 on"
done
if [[ $launcher != local && $launcher != slurm ]]; then die "--launcher $launcher: local or slurm"; fi
if [[ $launcher == local ]] && ((${#slurm[@]})); then die "${slurm[0]} is for --launcher slurm"; fi

if [[ $what == *.py ]]; then
  [[ -f $what ]] || die "no script $what in $PWD"
  ((${#ids[@]})) || die "--env-ids names no environment"
  if [[ -n $keep ]]; then die "--keep is for suites; plot_runs.py --keep DIR keeps any runs"; fi
  seen=" "
  for flag in "${given[@]}"; do
    name=${flag%%=*} name=${name//_/-} name=${name/#--no-/--}
    if [[ $flag == --* && $seen == *" $name "* ]]; then die "${flag%%=*} is given twice"; fi
    seen+="$name "
    case ${flag%%=*} in
      --seed | --env[-_]id | --run[-_]dir | --resume) die "${flag%%=*} can't come after --: the sweep sets it" ;;
    esac
  done
  sweep "$what" "${ids[*]}" "${number_of_seeds:-1}" "${given[@]}"
else
  if ((${#ids[@]} + ${#given[@]} + ${#number_of_seeds})); then die "a suite has its own environments, seeds and flags"; fi
  suite "$what"
fi

todo=()
for i in "${!directories[@]}"; do
  state=$(state "$i")
  if [[ -n $dry_run ]]; then echo "$(command_of "$i")  # $state"; fi
  case $state in
    finished) finished=$((finished + 1)) ;;
    diverged) diverged=$((diverged + 1)) ;;
    *) todo+=("$i") ;;
  esac
done
if [[ -n $dry_run ]]; then exit; fi
if [[ -n $keep ]]; then
  kept=()
  for i in "${!directories[@]}"; do
    case $(state "$i") in finished | diverged) kept+=("${directories[i]}") ;; esac
  done
  ((${#kept[@]})) || die "no run of $what in $runs has ended yet"
  echo "keeping ${#kept[@]} of the ${#directories[@]} runs of $what; of the others the table has those of results/runs/$what"
  "$python" "${here}plot_runs.py" "${kept[@]}" --keep "${here}results/runs/$what"
  "$python" "${here}plot_runs.py" "${here}results/runs/$what" --out "${here}results/figures/$what.png"
  exit
fi
if ((!${#todo[@]})); then echo "all ${#directories[@]} runs have ended: $finished finished, $diverged diverged" && exit; fi
mkdir -p "$runs" 2>/dev/null || die "--runs $runs can't be made"
if [[ $launcher == slurm ]]; then run_on_slurm; else run_here; fi
