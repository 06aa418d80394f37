"""Training on actor ranks: sharded trainers of policy and critic, logprob scoring, credit and offloading."""
