"""What one rank does with a plan: batch builder, model runner, sampler, verification."""
