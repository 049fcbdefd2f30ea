MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
actor_tp=${ACTOR_TP:-2}
files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
case "${DEVICE:-gpu}" in
    gpu)
        n_devices=${NGPUS:-8}
        ;;
    npu) n_devices=16 ;;
esac
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="$files"
    data.train_batch_size=${TRAIN_BATCH_SIZE:-1024}  # prompts
    data.max_prompt_length=1024
    data.max_response_length=1024
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${actor_tp}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.rollout.n=5
)
if [ "${EXTRA:-none}" = none ]; then
    ACTOR+=(trainer.val_before_train=False)
fi
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \
    "${DATA[@]}" "${ACTOR[@]}" \
    trainer.n_gpus_per_node=${n_devices} \
    trainer.experiment_name=qwen3_8b_$(date +%Y) \
    trainer.total_training_steps=100 "$@" 2>&1 | tee log.txt
