//! Messages that are sent by the clock, through the whole mesh.

use std::time::Duration;

use construct_proto::v1::{
    self, MissedRuns, ScheduleRunOutcome, TurnOutcome,
    schedule_service_client::ScheduleServiceClient,
};
use construct_tests::{
    client::{PATIENCE, id},
    mesh::{Mesh, Service},
    wait::until,
};
use jiff::{Timestamp, tz::TimeZone};
use serde_json::json;
use tonic::{Code, transport::Channel};

fn time(at: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: at.as_second(), nanos: at.subsec_nanosecond() }
}

fn spec(name: &str) -> v1::ScheduleSpec {
    let block = v1::block::Block::Text(v1::Text { text: format!("{name} calls") });
    v1::ScheduleSpec {
        name: name.into(),
        blocks: vec![v1::Block { block: Some(block) }],
        ..v1::ScheduleSpec::default()
    }
}

async fn create(
    schedules: &mut ScheduleServiceClient<Channel>,
    spec: v1::ScheduleSpec,
) -> Result<v1::Schedule, tonic::Status> {
    let request =
        v1::CreateScheduleRequest { spec: Some(spec), ..v1::CreateScheduleRequest::default() };
    Ok(schedules.create_schedule(request).await?.into_inner())
}

async fn runs(
    schedules: &mut ScheduleServiceClient<Channel>,
    schedule: &str,
) -> Vec<v1::ScheduleRun> {
    let request = v1::ListScheduleRunsRequest { schedule: schedule.into() };
    schedules.list_schedule_runs(request).await.unwrap().into_inner().runs
}

#[tokio::test]
async fn a_message_is_sent_at_its_time_once_even_when_that_passed_while_nobody_looked() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]}))
        .await
        .unwrap();
    let client = mesh.client().unwrap();
    let mut schedules = ScheduleServiceClient::new(mesh.channel().unwrap());
    let conversation = client.begin("worker", None).await.unwrap();

    // The reconcilers are dead when the time comes, and two look at once afterwards.
    let at = Timestamp::now() + Duration::from_secs(1);
    mesh.kill(Service::Reconciler).unwrap();
    let for_task =
        v1::ScheduleSpec { task: conversation.id().into(), at: Some(time(at)), ..spec("task") };
    create(&mut schedules, for_task.clone()).await.unwrap();
    let taken = create(&mut schedules, for_task).await.unwrap_err();
    assert_eq!(taken.code(), Code::AlreadyExists);
    let for_agent = v1::ScheduleSpec {
        agent: "worker".into(),
        title: "By the clock".into(),
        at: Some(time(at)),
        missed_runs: MissedRuns::Once.into(),
        ..spec("agent")
    };
    create(&mut schedules, for_agent).await.unwrap();
    until(
        "the time to pass",
        PATIENCE,
        async || if Timestamp::now() > at { Ok(()) } else { Err(()) },
    )
    .await;
    mesh.spawn(Service::Reconciler).unwrap();
    mesh.replicate(Service::Reconciler).await.unwrap();

    conversation
        .task_when("the scheduled message to be answered", |_, status| {
            status.last_outcome() == TurnOutcome::Completed && status.queued_count == 0
        })
        .await;
    let transcript = conversation.transcript().await;
    transcript.check(&["task calls"]);
    assert_eq!(transcript.answers(), ["task calls"]);
    until("the run for the agent", PATIENCE, async || {
        match runs(&mut schedules.clone(), "agent").await.as_slice() {
            [_] => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let run = runs(&mut schedules, "agent").await.remove(0);
    assert_eq!(run.outcome(), ScheduleRunOutcome::Sent);
    let begun = client.conversation(&run.task);
    begun
        .task_when("the begun task to answer", |_, status| {
            status.last_outcome() == TurnOutcome::Completed
        })
        .await;
    begun.transcript().await.check(&["agent calls"]);
    let over = v1::GetScheduleRequest { schedule: "task".into() };
    let over = schedules.get_schedule(over).await.unwrap().into_inner();
    assert_eq!(over.status.unwrap().next_run, None);
    assert_eq!(runs(&mut schedules, "task").await.len(), 1);
}

/// A zone whose minutes are not those of UTC either, and whose clocks are never turned: 5 h 45 min
/// ahead.
const ZONE: &str = "Asia/Kathmandu";

#[tokio::test]
async fn a_pattern_in_a_time_zone_has_the_agent_asked_at_that_time_of_the_day_there() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]}))
        .await
        .unwrap();
    let mut schedules = ScheduleServiceClient::new(mesh.channel().unwrap());
    // Patterns know minutes: the next one that has not nearly begun.
    let minutes = (Timestamp::now() + Duration::from_secs(5)).as_second().div_euclid(60) + 1;
    let due = Timestamp::from_second(minutes * 60).unwrap();
    let there = due.to_zoned(TimeZone::get(ZONE).unwrap());
    let daily = v1::ScheduleSpec {
        agent: "worker".into(),
        title: "By the clock there".into(),
        cron: format!("{} {} * * *", there.minute(), there.hour()),
        time_zone: ZONE.into(),
        ..spec("daily")
    };
    let made = create(&mut schedules, daily).await.unwrap();
    assert_eq!(made.status.unwrap().next_run, Some(time(due)));
    let run = until("the run", PATIENCE, async || {
        let mut runs = runs(&mut schedules.clone(), "daily").await;
        if runs.len() == 1 { Ok(runs.remove(0)) } else { Err(format!("{runs:?}")) }
    })
    .await;
    assert!(Timestamp::now() >= due, "it is not made before its time");
    assert_eq!((run.outcome(), run.due), (ScheduleRunOutcome::Sent, Some(time(due))));
    let begun = mesh.client().unwrap().conversation(&run.task);
    let status = begun.settled().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed);
    let transcript = begun.transcript().await;
    assert_eq!(transcript.check(&["daily calls"]).answers(), ["daily calls"]);
    // The same time tomorrow.
    let made = schedules
        .get_schedule(v1::GetScheduleRequest { schedule: "daily".into() })
        .await
        .unwrap()
        .into_inner();
    let tomorrow = due + Duration::from_secs(24 * 60 * 60);
    assert_eq!(made.status.unwrap().next_run, Some(time(tomorrow)));
}

#[tokio::test]
async fn schedules_are_kept_changed_paused_and_deleted() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": []})).await.unwrap();
    let mut schedules = ScheduleServiceClient::new(mesh.channel().unwrap());
    let weekly = v1::ScheduleSpec {
        agent: "worker".into(),
        cron: "0 9 * * MON".into(),
        time_zone: "Europe/Berlin".into(),
        ..spec("weekly")
    };
    let made = create(&mut schedules, weekly.clone()).await.unwrap();
    let next = made.status.unwrap().next_run.unwrap();
    assert!(next.seconds > Timestamp::now().as_second());
    for (broken, field) in [
        (v1::ScheduleSpec { cron: "61 * * * *".into(), ..weekly.clone() }, "spec.cron"),
        (
            v1::ScheduleSpec { time_zone: "Europe/Atlantis".into(), ..weekly.clone() },
            "spec.time_zone",
        ),
        (
            v1::ScheduleSpec {
                at: Some(time(Timestamp::UNIX_EPOCH)),
                cron: String::new(),
                time_zone: String::new(),
                ..weekly.clone()
            },
            "spec.at",
        ),
        (
            v1::ScheduleSpec {
                task: "task_01890a5d-ac96-774b-bcce-b302099a8057".into(),
                ..weekly.clone()
            },
            "spec.agent",
        ),
        (v1::ScheduleSpec { blocks: Vec::new(), ..weekly.clone() }, "spec.blocks"),
    ] {
        let refused = create(&mut schedules, broken).await.unwrap_err();
        assert!(
            refused.code() == Code::InvalidArgument && refused.message().contains(field),
            "{refused:?}"
        );
    }
    let update = v1::UpdateScheduleRequest {
        schedule: "weekly".into(),
        cron: Some("0 10 * * MON".into()),
        ..v1::UpdateScheduleRequest::default()
    };
    let updated = schedules.update_schedule(update).await.unwrap().into_inner();
    assert_eq!(updated.spec.unwrap().time_zone, "Europe/Berlin", "what is not said stays");
    let later = updated.status.unwrap().next_run.unwrap();
    assert_eq!(
        (later.seconds - next.seconds).rem_euclid(7 * 24 * 3600),
        3600,
        "{later:?} {next:?}"
    );
    let pause = v1::PauseScheduleRequest {
        schedule: "weekly".into(),
        ..v1::PauseScheduleRequest::default()
    };
    assert!(schedules.pause_schedule(pause).await.unwrap().into_inner().status.unwrap().paused);
    let resume = v1::ResumeScheduleRequest {
        schedule: "weekly".into(),
        ..v1::ResumeScheduleRequest::default()
    };
    assert!(!schedules.resume_schedule(resume).await.unwrap().into_inner().status.unwrap().paused);
    let list =
        schedules.list_schedules(v1::ListSchedulesRequest::default()).await.unwrap().into_inner();
    assert_eq!(list.schedules.len(), 1);
    assert!(id(list.schedules[0].metadata.as_ref()).starts_with("schedule_"));
    let delete = v1::DeleteScheduleRequest {
        schedule: "weekly".into(),
        ..v1::DeleteScheduleRequest::default()
    };
    schedules.delete_schedule(delete).await.unwrap();
    let get = v1::GetScheduleRequest { schedule: "weekly".into() };
    assert_eq!(schedules.get_schedule(get).await.unwrap_err().code(), Code::NotFound);
}
