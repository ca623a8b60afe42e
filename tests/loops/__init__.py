"""Right and wrong loops for the tests of the audit."""
