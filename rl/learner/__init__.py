"""Training on actor ranks: the sharded trainers of policy and critic, scoring, advantages and offloading."""
