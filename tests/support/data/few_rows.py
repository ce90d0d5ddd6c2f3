"""Settings with which experiment=arith makes few rows: the check of a command then takes no seconds."""

FEW_ROWS = (
    "data.arith.train_size=400",
    "data.arith.eval_size=32",
    "data.arith.demo_size=400",
    "evaluation.problems=16",
)
