"""Configuration of a trial: its schema, what follows from it, and the rules that it obeys. No torch.

From low to high; a module imports only modules to its left, or above:

    fields   schema_cluster, schema_data, schema_rollout, schema_train   schema     the fields, section by section
    paths   compose   reference   evaluation_sets                                    files, command line, pages
    doors   allocation   dataflow                                                    parts, places, calls and roles
    machine   backend_rules   trial_sizes   training_rules                           facts and rules that others need
    rank_memory   device_memory   device_plan   memory_remedies   memory_check       what fits where
    rules                                                                            the check of everything
"""
