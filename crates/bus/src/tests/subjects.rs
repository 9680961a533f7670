use std::fmt::Debug;

use construct_domain::{AgentId, ModelId, ModelProviderId, partition};
use construct_proto::{
    mesh::v1::StepLocationQuery,
    v1::{Agent, Deleted, Event, Metadata, event::Payload},
};
use uuid::Uuid;

use super::{ORGANIZATION, event, execute, invoke, matches, step, task, wake};
use crate::{
    Address, Entity, EventType, Pool, Service,
    subject::{
        self, BreakerState, BreakerUpdate, BreakersRequest, Cancel, CheckProvider, CodeExecute,
        CountTokens, DeadLetters, Delta, EntityEvent, EventAddress, Journal, ListVendorModels,
        ModelInvoke, TaskEvent, TaskResult, TaskWake, Tools,
    },
    topology::Stream,
};

fn reads_back<A: Address>(address: &A, expected: &str) {
    assert_eq!(address.subject(), expected);
    assert_eq!(A::parse(expected).as_ref(), Ok(address));
    assert!(matches(&A::pattern(), expected), "{}", A::pattern());
    for broken in [
        format!("{expected}.more"),
        format!("{expected}."),
        format!("x.{expected}"),
        expected.replacen("v1", "v2", 1),
        expected.rsplit_once('.').map(|(front, _)| front.to_owned()).unwrap_or_default(),
        String::new(),
    ] {
        assert!(A::parse(&broken).is_err(), "{broken}");
    }
}

const TASK: &str = "task_00000000-0000-0000-0000-000000000007";
const ORG: &str = "org_00000000-0000-7000-8000-000000000001";

#[test]
fn subjects_have_their_public_form_and_parse() {
    let partition = partition::for_task(task(7));
    reads_back(
        &TaskWake::new(task(7)),
        &format!("construct.v1.cmd.task.wake.{partition:02}.{TASK}"),
    );
    reads_back(
        &TaskResult::new(task(7)),
        &format!("construct.v1.cmd.task.result.{partition:02}.{TASK}"),
    );
    reads_back(
        &ModelInvoke::new(Pool::model_default(), task(7)),
        &format!("construct.v1.cmd.model.invoke.default.{TASK}"),
    );
    reads_back(
        &CodeExecute::new(Pool::code_default(), task(7)),
        &format!("construct.v1.cmd.code.execute.cpu-2.{TASK}"),
    );
    reads_back(
        &Delta { organization: ORGANIZATION, task: task(7) },
        &format!("construct.v1.delta.{ORG}.task.{TASK}"),
    );
    reads_back(
        &Journal { step: step(7) },
        "construct.v1.journal.step_00000000-0000-0000-0000-000000000007",
    );
    reads_back(&Cancel { service: Service::Providers }, "construct.v1.ctl.providers.all.cancel");
    reads_back(
        &Tools { pool: Pool::code_default() },
        "construct.v1.ctl.interpreter.pool.cpu-2.tools",
    );
    reads_back(
        &BreakerUpdate { instance: "providers-1".into() },
        "construct.v1.ctl.providers.providers-1.breaker",
    );
    reads_back(&BreakersRequest, "construct.v1.ctl.providers.all.breakers");
    reads_back(&BreakerState, "construct.v1.ctl.providers.any.state");
    reads_back(&CheckProvider, "construct.v1.ctl.providers.any.check");
    reads_back(&ListVendorModels, "construct.v1.ctl.providers.any.models");
    reads_back(&CountTokens, "construct.v1.ctl.providers.any.tokens");
    reads_back(&DeadLetters { stream: Stream::Model }, "construct.v1.dead.CONSTRUCT_MODEL");
    let beat = subject::ReconcilerHeartbeat { instance: "reconciler-1".into() };
    reads_back(&beat, "construct.v1.ctl.reconciler.reconciler-1.beat");
    reads_back(&subject::Census, "construct.v1.ctl.reconciler.census");
    reads_back(&subject::Models, "construct.v1.ctl.reconciler.models");
    reads_back(&subject::Budgets, "construct.v1.ctl.reconciler.budgets");
    reads_back(&subject::Subtasks, "construct.v1.ctl.reconciler.subtasks");
    reads_back(&subject::StepLocation, "construct.v1.ctl.reconciler.step_location");
    let spending = subject::Spending { organization: ORGANIZATION };
    reads_back(&spending, &format!("construct.v1.cmd.spending.{ORGANIZATION}"));
    let slack =
        subject::SlackDelivery::new(subject::SlackKind::Action, "T0123").expect("it is a team");
    reads_back(&slack, "construct.v1.cmd.slack.action.T0123");
    let scan = construct_domain::ScanId::from_uuid(Uuid::from_u128(7));
    let id = "scan_00000000-0000-0000-0000-000000000007";
    reads_back(
        &subject::ScanRun { organization: ORGANIZATION, scan },
        &format!("construct.v1.cmd.scan.run.{ORG}.{id}"),
    );
    reads_back(
        &subject::ScanUpdate { organization: ORGANIZATION, scan },
        &format!("construct.v1.evt.{ORG}.scan.{id}"),
    );
    reads_back(
        &subject::ToolCreate { organization: ORGANIZATION },
        &format!("construct.v1.cmd.tool.create.{ORG}"),
    );
    reads_back(
        &subject::StateUpdate { organization: ORGANIZATION },
        &format!("construct.v1.ctl.gateway.{ORG}.state"),
    );
    reads_back(&subject::ListRepositories, "construct.v1.ctl.scanner.any.repositories");
    for (kind, entity) in [
        ("agent", Entity::Agent(AgentId::from_uuid(Uuid::from_u128(7)))),
        ("model", Entity::Model(ModelId::from_uuid(Uuid::from_u128(7)))),
        ("provider", Entity::Provider(ModelProviderId::from_uuid(Uuid::from_u128(7)))),
    ] {
        let address = EntityEvent {
            organization: ORGANIZATION,
            entity,
            event: kind_of(&format!("{kind}.updated")),
        };
        let subject = format!(
            "construct.v1.evt.{ORG}.{kind}.{kind}_00000000-0000-0000-0000-000000000007.{kind}.updated"
        );
        assert_eq!(address.subject(), subject);
        assert_eq!(EntityEvent::parse(&subject), Ok(address));
    }
}

fn kind_of(name: &str) -> EventType {
    EventType::new(name).expect("a valid type")
}

#[test]
fn event_type_words_are_subject_tokens() {
    for name in ["error", "message.created"] {
        let address = TaskEvent { organization: ORGANIZATION, task: task(7), event: kind_of(name) };
        assert_eq!(address.subject(), format!("construct.v1.evt.{ORG}.task.{TASK}.{name}"));
        assert_eq!(TaskEvent::parse(&address.subject()), Ok(address));
    }
    for name in ["", ".", "a.", ".a", "a.b.c", "A", "a b", "a*", "a.>", "message.Created"] {
        assert!(EventType::new(name).is_err(), "{name}");
    }
}

#[test]
fn task_in_wrong_partition_is_rejected() {
    let subject = TaskWake::new(task(7)).subject();
    let own = format!(".{:02}.", partition::for_task(task(7)));
    let other = format!(".{:02}.", (partition::for_task(task(7)) + 1) % partition::COUNT);
    assert!(TaskWake::parse(&subject.replace(&own, &other)).is_err());
}

#[test]
fn pool_name_invalid_as_token_is_rejected() {
    for name in ["", "a.b", "*", ">", "a b", "Größe", "2x", "-x", &"x".repeat(33)] {
        assert!(Pool::new(name).is_err(), "{name}");
    }
}

fn refuses<A: Address>(address: &A, message: &A::Message)
where
    A::Message: Debug,
{
    assert!(address.check(message).is_err(), "{address:?} {message:?}");
}

#[test]
fn payload_with_other_ids_is_rejected() {
    refuses(&TaskWake::new(task(7)), &wake(task(8), ""));
    refuses(&TaskWake::new(task(7)), &construct_proto::mesh::v1::TaskWake::default());
    refuses(&ModelInvoke::new(Pool::model_default(), task(7)), &invoke(task(8), 1));
    let elsewhere = construct_proto::mesh::v1::CodeExecute {
        compute: "cpu-8".to_owned(),
        ..execute(task(7), 1)
    };
    refuses(&CodeExecute::new(Pool::code_default(), task(7)), &elsewhere);
    refuses(&TaskResult::new(task(7)), &Default::default());
    refuses(&BreakerUpdate { instance: "one".into() }, &Default::default());
    refuses(&subject::ReconcilerHeartbeat { instance: "one".into() }, &Default::default());
    refuses(&subject::StateUpdate { organization: ORGANIZATION }, &Default::default());
    refuses(&Journal { step: step(1) }, &Default::default());
    refuses(&subject::StepLocation, &Default::default());
    let question = StepLocationQuery {
        organization_id: ORGANIZATION.to_string(),
        task_id: task(7).to_string(),
        ..Default::default()
    };
    let of = |step_id: &str| StepLocationQuery { step_id: step_id.to_owned(), ..question.clone() };
    assert!(subject::StepLocation.check(&of("")).is_ok(), "no step is asked about");
    refuses(&subject::StepLocation, &of("step_1"));
    refuses(
        &Delta { organization: ORGANIZATION, task: task(7) },
        &event(task(7), "message.created", 0, 0),
    );
    let address =
        TaskEvent { organization: ORGANIZATION, task: task(7), event: kind_of("message.created") };
    refuses(&address, &event(task(7), "message.updated", 0, 0));
}

#[test]
fn event_address_follows_from_the_event() {
    let of = |event: &Event| match EventAddress::from_event(event) {
        Ok(EventAddress::Task(address)) => address.subject(),
        Ok(EventAddress::Entity(address)) => address.subject(),
        Ok(EventAddress::Delta(address)) => address.subject(),
        Err(error) => error.to_string(),
    };
    assert_eq!(
        of(&event(task(7), "message.delta", 1, 1)),
        format!("construct.v1.delta.{ORG}.task.{TASK}")
    );
    assert_eq!(
        of(&event(task(7), "message.restarted", 1, 1)),
        format!("construct.v1.delta.{ORG}.task.{TASK}")
    );
    assert_eq!(
        of(&event(task(7), "tool.called", 1, 1)),
        format!("construct.v1.evt.{ORG}.task.{TASK}.tool.called")
    );
    let agent = "agent_00000000-0000-0000-0000-000000000007".to_owned();
    let about = |kind: &str, payload| Event {
        r#type: kind.to_owned(),
        organization_id: ORG.to_owned(),
        payload: Some(payload),
        ..Default::default()
    };
    let metadata = Some(Metadata { id: agent.clone(), ..Default::default() });
    let updated = about("agent.updated", Payload::Agent(Agent { metadata, ..Default::default() }));
    assert_eq!(of(&updated), format!("construct.v1.evt.{ORG}.agent.{agent}.agent.updated"));
    let deleted = about("agent.deleted", Payload::Deleted(Deleted { id: agent.clone() }));
    assert_eq!(of(&deleted), format!("construct.v1.evt.{ORG}.agent.{agent}.agent.deleted"));
    assert!(EventAddress::from_event(&Event::default()).is_err());
}
