# SPDX-License-Identifier: Apache-2.0
"""Of each fenced block of README.md and docs/: which test runs or checks it, or why none does.

A block is known by a phrase that is in no other block of its page.  A test of `RUN` takes the text
from the page (`block` or `blocks`), adds only what the page says that the reader has, and asserts
what the page promises.
"""

RUN = {
    "README.md": {
        "host peak GiB": "test_readme_tables_of_the_demo_are_its_records",
        '"zero_optimization": {"stage": 2': "test_readme_json_example_steps_in_an_engine",
        "torch.nn.Linear(256, 256))\noptimizer": (
            "test_readme_python_example_runs_and_prints_the_report"
        ),
        "fully_shard(model": "test_readme_fsdp2_example_prints_the_report_that_readme_shows",
        "$ torchrun": "test_readme_fsdp2_example_prints_the_report_that_readme_shows",
    },
    "docs/algorithms.md": {
        "SGD8bitBlockwise": "test_optimizer_section_of_the_docs_makes_that_optimizer",
        '"type": "Muon8bitBlockwise"': "test_optimizer_section_of_the_docs_makes_that_optimizer",
        "zero8.Muon8bitBlockwise": "test_python_block_of_the_docs_runs",
    },
    "docs/architecture.md": {
        "spec <-": "test_layers_line_of_the_architecture_is_in_the_order_of_the_table",
    },
    "docs/checkpoints.md": {
        "runs/7b/global_step800 is damaged": (
            "test_load_of_a_damaged_checkpoint_is_the_error_that_readme_shows"
        ),
        "tagged.saving": "test_readme_example_of_tags_makes_a_complete_one",
        "$ zero8 checkpoint verify": "test_readme_commands_of_checkpoints_print_what_readme_shows",
    },
    "docs/command-line.md": {
        "--parameters 671B": "test_plan_of_each_size_that_the_docs_name_prints_a_plan",
        "--host-memory": "test_plan_in_a_page_is_what_the_command_prints",
    },
    "docs/faq.md": {
        'float("inf")': "test_python_block_of_the_docs_runs",
        "zero8.export": "test_python_block_of_the_docs_runs",
    },
    "docs/from-adamw-to-8-bit.md": {
        "$ zero8 plan": "test_plan_of_a_config_in_a_page_is_what_the_command_prints",
        '+    "type"': "test_word_to_change_is_the_only_difference_from_a_config_of_adamw",
        "class Check": "test_page_on_adamw_is_what_happens",
        "RuntimeError": "test_page_on_adamw_is_what_happens",
        "1,441,792": "test_page_on_adamw_is_what_happens",
        "resume_from_checkpoint": "test_page_on_adamw_is_what_happens",
        "--to zero": "test_page_on_adamw_is_what_happens",
        "--to fp32": "test_page_on_adamw_is_what_happens",
    },
    "docs/from-bitsandbytes.md": {
        "fp32_params": "test_python_block_of_the_docs_runs",
        "zero8 checkpoint inspect bnb.pt": "test_commands_for_a_bitsandbytes_file_make_one_to_load",
    },
    "docs/how-it-works.md": {
        "were saved with": "test_load_with_other_settings_logs_the_line_that_the_docs_show",
    },
    "docs/integrations.md": {
        '"weight_decay": "auto"': "test_json_of_trainer_is_the_section_of_its_configs",
        "bf16=True": "test_trainer_block_with_a_deepspeed_config_trains",
        "hf.optimizer(args, fp32_params": "test_trainer_blocks_without_deepspeed_train",
        "hf.Monitor": "test_trainer_blocks_without_deepspeed_train",
        "$ zero8 checkpoint convert": "test_trainer_blocks_without_deepspeed_train",
        "accelerator.prepare": "test_accelerate_block_steps",
        "get_peft_model": "test_peft_blocks_by_hand_and_with_sfttrainer_train_adapters",
        "hf.optimizer(args),": "test_peft_blocks_by_hand_and_with_sfttrainer_train_adapters",
        "SFTConfig": "test_sfttrainer_block_with_a_deepspeed_config_trains_adapters",
        "trainer.save_checkpoint": "test_lightning_blocks_train_alone_and_under_fsdp2",
        "ModelParallelStrategy(": "test_lightning_blocks_train_alone_and_under_fsdp2",
        "DeepSpeedStrategy(": "test_lightning_block_of_deepspeed_trains_on_a_standin_for_cuda",
        "Adam8bitContainer.Config": "test_torchtitan_block_builds_an_optimizer_that_steps",
        "learning_rate: 2e-5": "test_yaml_names_a_deepspeed_config_that_is_there",
        "finetuning_type": "test_yaml_names_a_deepspeed_config_that_is_there",
        "BasePlugin": "test_recipe_of_a_program_makes_our_optimizer_with_its_settings_and_groups",
        "OptimizerPlugin": (
            "test_recipe_of_a_program_makes_our_optimizer_with_its_settings_and_groups"
        ),
        "optimizers_map": (
            "test_recipe_of_a_program_makes_our_optimizer_with_its_settings_and_groups"
        ),
        "main_ppo": "test_recipe_of_a_program_makes_our_optimizer_with_its_settings_and_groups",
        "HybridDeviceOptimizer": (
            "test_recipe_of_a_program_makes_our_optimizer_with_its_settings_and_groups"
        ),
        "monitor(engine": "test_deepspeed_monitor_block_writes_the_health",
        "ValueError: load_state_dict": (
            "test_adamw_that_is_given_8_bit_states_raises_what_the_docs_show"
        ),
    },
    "docs/low-bit-training.md": {
        "quantize_(model, int8_weight_only": "test_int8_weights_block_prints_what_the_page_shows",
        "1.015625": "test_int8_weights_block_prints_what_the_page_shows",
        "quantize_(model, int8_mixed": "test_low_bit_blocks_step_and_are_saved_and_loaded",
        "Float8LinearConfig(": "test_low_bit_blocks_step_and_are_saved_and_loaded",
        "add_safe_globals": "test_low_bit_blocks_step_and_are_saved_and_loaded",
        "quantize_(model, bitnet": "test_bitnet_block_trains_on_two_ranks_and_is_saved_and_loaded",
        "def tensors(model)": "test_bitnet_block_trains_on_two_ranks_and_is_saved_and_loaded",
    },
}

NOT_RUN = {
    "README.md": {
        '-    "type"': "the word that the JSON below it has, which a test runs",
        "make train     #": "takes hours; tests/package/test_doc_blocks.py has make show it",
        "pip install .": "downloads packages; tests/package/test_wheel.py installs what is built",
        "HOSTFILE=hosts": "needs several hosts, as tests/multinode/test_multinode.py has",
    },
    "docs/checkpoints.md": {
        "DIR/universal": "as test_readme_commands_of_checkpoints_print_what_readme_shows types it",
        "for state in engine": "tests/checkpoint/test_zero_switch.py has these lines",
    },
    "docs/from-adamw-to-8-bit.md": {"pip install": "downloads packages"},
    "docs/releasing.md": {
        "make wheel": "downloads packages; tests/package/test_wheel.py builds without",
    },
}
