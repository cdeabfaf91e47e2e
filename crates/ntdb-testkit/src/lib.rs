//! Programs and simulators that the tests of ntdb run.
