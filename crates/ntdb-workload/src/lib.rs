//! The workloads of `ntdb bench`: what is done, by how many, and how it is measured; not on which engine.
//!
//! An engine is a [`session::Session`] for each client. The workloads are TPC-B ([`tpcb`]), the mixes of YCSB ([`mixed`]), pairs of
//! mapped identities ([`mapping`]), and readers and writers side by side ([`traffic`]); what one client does of them is a [`job::Job`].
//! Clients are threads or processes ([`crew`]), and start together. A figure is the median of several runs ([`series`]); latencies are
//! percentiles of a histogram ([`latency`]); and the machine is described ([`machine`]).
#![deny(missing_docs)]

pub mod crew;
pub mod job;
pub mod latency;
pub mod machine;
pub mod mapping;
pub mod mixed;
pub mod series;
pub mod session;
pub mod tpcb;
pub mod traffic;
