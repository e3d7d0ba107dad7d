//! Which workers an embedded router should have, and by whose declaration. Pure.
//!
//! Each name has one declaration. Workers of `--worker` never change. A file's workers replace those
//! of the API that exclude them (the same name, URL or endpoint), because a file survives a restart
//! and the API's workers do not. The API changes only its own workers.

use std::collections::BTreeMap;

use serde::Serialize;
use warmroute_proto::WorkerId;

use crate::config::{WorkerSetError, WorkerSpec, check_workers};

/// What declared a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerOrigin {
    Flag,
    File,
    Api,
}

/// Why the API's request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlanError {
    #[error(transparent)]
    Set(#[from] WorkerSetError),
    #[error("the worker is declared by {}: change it there", match .0 {
        WorkerOrigin::Flag => "--worker",
        WorkerOrigin::File => "a file",
        WorkerOrigin::Api => "the API",
    })]
    DeclaredElsewhere(WorkerOrigin),
    #[error("there is no such worker")]
    NoWorker,
}

/// What a request changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlanChange {
    Added,
    /// An equal declaration stands already.
    None,
}

/// A declared worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedWorker {
    pub spec: WorkerSpec,
    pub origin: WorkerOrigin,
}

#[derive(Debug, Default)]
pub(crate) struct WorkerPlan(BTreeMap<WorkerId, PlannedWorker>);

impl WorkerPlan {
    pub(crate) fn new(flags: &[WorkerSpec]) -> Self {
        let mut plan = Self::default();
        plan.insert_all(flags, WorkerOrigin::Flag);
        plan
    }

    /// Replaces the workers of the files, which were checked against those of `--worker`.
    pub(crate) fn set_files(&mut self, files: &[WorkerSpec]) {
        self.0.retain(|worker, planned| match planned.origin {
            WorkerOrigin::Flag => true,
            WorkerOrigin::File => false,
            WorkerOrigin::Api => {
                let excluded = files.iter().any(|file| file.excludes(&planned.spec));
                if excluded {
                    tracing::warn!(%worker, "a file's worker replaces the API's");
                }
                !excluded
            }
        });
        self.insert_all(files, WorkerOrigin::File);
    }

    /// Adds a worker of the API. Idempotent.
    pub(crate) fn add(&mut self, spec: WorkerSpec) -> Result<PlanChange, PlanError> {
        if self.get(&spec.id).is_some_and(|known| known.spec == spec) {
            return Ok(PlanChange::None);
        }
        let all = self.0.values().map(|planned| &planned.spec);
        check_workers(all.chain([&spec]))?;
        self.insert_all(&[spec], WorkerOrigin::Api);
        Ok(PlanChange::Added)
    }

    /// Removes a worker of the API.
    pub(crate) fn remove(&mut self, worker: &WorkerId) -> Result<(), PlanError> {
        match self.get(worker).map(|planned| planned.origin) {
            None => Err(PlanError::NoWorker),
            Some(WorkerOrigin::Api) => {
                self.0.remove(worker);
                Ok(())
            }
            Some(other) => Err(PlanError::DeclaredElsewhere(other)),
        }
    }

    pub(crate) fn get(&self, worker: &WorkerId) -> Option<&PlannedWorker> {
        self.0.get(worker)
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = &PlannedWorker> {
        self.0.values()
    }

    fn insert_all(&mut self, specs: &[WorkerSpec], origin: WorkerOrigin) {
        for spec in specs {
            let planned = PlannedWorker {
                spec: spec.clone(),
                origin,
            };
            self.0.insert(spec.id.clone(), planned);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> WorkerSpec {
        text.parse().unwrap()
    }

    fn origins(plan: &WorkerPlan) -> Vec<(&str, WorkerOrigin)> {
        let shown = plan.workers();
        shown
            .map(|planned| (planned.spec.id.as_str(), planned.origin))
            .collect()
    }

    #[test]
    fn the_api_changes_its_own_workers_only() {
        let mut plan = WorkerPlan::new(&[spec("http://f:1,id=flag")]);
        plan.set_files(&[spec("http://g:1,id=file")]);
        let added = plan.add(spec("http://h:1,id=api"));
        assert_eq!(added, Ok(PlanChange::Added));
        assert_eq!(plan.add(spec("http://h:1,id=api")), Ok(PlanChange::None));
        assert_eq!(plan.add(spec("http://g:1,id=file")), Ok(PlanChange::None));
        let clash = plan.add(spec("http://i:1,id=api"));
        assert_eq!(clash, Err(WorkerSetError::Id("api".into()).into()));
        let clash = plan.add(spec("http://f:1,id=x"));
        let url = WorkerSetError::Url("http://f:1".to_owned());
        assert_eq!(clash, Err(url.into()));
        for (worker, origin) in [("flag", WorkerOrigin::Flag), ("file", WorkerOrigin::File)] {
            let refused = plan.remove(&worker.into());
            assert_eq!(refused, Err(PlanError::DeclaredElsewhere(origin)));
        }
        assert_eq!(plan.remove(&"api".into()), Ok(()));
        assert_eq!(plan.remove(&"api".into()), Err(PlanError::NoWorker));
    }

    #[test]
    fn a_file_replaces_its_workers_and_those_of_the_api_that_it_excludes() {
        use WorkerOrigin::{Api, File};
        let mut plan = WorkerPlan::default();
        for text in ["http://a:1,id=a", "http://b:1,id=b", "http://c:1,id=c"] {
            plan.add(spec(text)).unwrap();
        }
        plan.set_files(&[spec("http://a:2,id=a"), spec("http://b:1,id=x")]);
        assert_eq!(origins(&plan), [("a", File), ("c", Api), ("x", File)]);
        assert_eq!(plan.get(&"a".into()).unwrap().spec.url, "http://a:2");
        plan.set_files(&[]);
        assert_eq!(origins(&plan), [("c", Api)]);
    }

    #[test]
    fn their_number_is_bounded() {
        let mut plan = WorkerPlan::default();
        let mut add = |number: u32| plan.add(spec(&format!("http://h:{number},ranks=4")));
        for number in 1..=1024 {
            add(number).unwrap();
        }
        assert_eq!(add(2000), Err(WorkerSetError::TooMany.into()));
    }
}
