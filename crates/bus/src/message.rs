//! Which protobuf messages travel on the mesh, and what they are called there.

use construct_proto::{mesh::v1 as mesh, v1};

/// A payload of the mesh.
pub trait Message: prost::Message + Default + Send + Sync + 'static {
    /// Full protobuf name, as it stands in the header `Construct-Type`.
    const NAME: &'static str;
}

macro_rules! messages {
    ($($message:ty => $name:literal;)*) => {
        $(impl Message for $message {
            const NAME: &'static str = $name;
        })*

        #[cfg(test)]
        pub(crate) const NAMES: &[&str] = &[$($name),*];
    };
}

messages! {
    mesh::BreakerChanged => "construct.mesh.v1.BreakerChanged";
    mesh::BreakerQuestion => "construct.mesh.v1.BreakerQuestion";
    mesh::BreakersWanted => "construct.mesh.v1.BreakersWanted";
    mesh::BudgetReserve => "construct.mesh.v1.BudgetReserve";
    mesh::BudgetReserved => "construct.mesh.v1.BudgetReserved";
    mesh::CancelStep => "construct.mesh.v1.CancelStep";
    mesh::CodeExecute => "construct.mesh.v1.CodeExecute";
    mesh::DeadLetter => "construct.mesh.v1.DeadLetter";
    mesh::JournalEntry => "construct.mesh.v1.JournalEntry";
    mesh::ModelFound => "construct.mesh.v1.ModelFound";
    mesh::ModelInvoke => "construct.mesh.v1.ModelInvoke";
    mesh::ModelLookup => "construct.mesh.v1.ModelLookup";
    mesh::ReconcilerBeat => "construct.mesh.v1.ReconcilerBeat";
    mesh::Repositories => "construct.mesh.v1.Repositories";
    mesh::RepositoriesQuestion => "construct.mesh.v1.RepositoriesQuestion";
    mesh::ScanRun => "construct.mesh.v1.ScanRun";
    mesh::SlackDelivery => "construct.mesh.v1.SlackDelivery";
    mesh::SpendingReport => "construct.mesh.v1.SpendingReport";
    mesh::ProviderCheck => "construct.mesh.v1.ProviderCheck";
    mesh::ProviderChecked => "construct.mesh.v1.ProviderChecked";
    mesh::StateChanged => "construct.mesh.v1.StateChanged";
    mesh::StepResult => "construct.mesh.v1.StepResult";
    mesh::SubtaskAnswer => "construct.mesh.v1.SubtaskAnswer";
    mesh::SubtaskQuestion => "construct.mesh.v1.SubtaskQuestion";
    mesh::TaskCensus => "construct.mesh.v1.TaskCensus";
    mesh::TaskWake => "construct.mesh.v1.TaskWake";
    mesh::TasksGone => "construct.mesh.v1.TasksGone";
    mesh::TokenCount => "construct.mesh.v1.TokenCount";
    mesh::TokenQuestion => "construct.mesh.v1.TokenQuestion";
    mesh::ToolCatalog => "construct.mesh.v1.ToolCatalog";
    mesh::ToolCreate => "construct.mesh.v1.ToolCreate";
    mesh::ToolCatalogRequest => "construct.mesh.v1.ToolCatalogRequest";
    mesh::VendorModels => "construct.mesh.v1.VendorModels";
    mesh::VendorModelsQuestion => "construct.mesh.v1.VendorModelsQuestion";
    mesh::Whereabouts => "construct.mesh.v1.Whereabouts";
    mesh::WhereaboutsQuestion => "construct.mesh.v1.WhereaboutsQuestion";
    v1::Breaker => "construct.v1.Breaker";
    v1::Event => "construct.v1.Event";
    v1::ScanEvent => "construct.v1.ScanEvent";
}

#[cfg(test)]
mod tests {
    use construct_proto::DESCRIPTORS;

    use super::NAMES;

    #[test]
    fn every_name_is_a_message_of_the_contracts() {
        for name in NAMES {
            assert!(DESCRIPTORS.get_message_by_name(name).is_some(), "{name}");
        }
    }
}
