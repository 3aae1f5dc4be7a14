"""Here, so that `rule_sets` can be imported from the folders below."""
