use construct_proto::{
    mesh::v1::FailureClass,
    v1::{self, CodeInterpreterCall, CodeInterpreterResult, Text},
};
use futures::TryStreamExt as _;
use tokio::time::Instant;

use super::*;
use crate::{answer::Answer, call::tests::command};

fn scripted(script: &str) -> Scripted {
    Scripted::parse(script, "provider".into(), Arc::default()).expect("the script is valid")
}

fn message(source: MessageSource, block: Block) -> ChatMessage {
    ChatMessage { source: source.into(), blocks: vec![v1::Block { block: Some(block) }] }
}

fn user(text: &str) -> ChatMessage {
    message(MessageSource::User, Block::Text(Text { text: text.into() }))
}

fn assistant(text: &str) -> ChatMessage {
    message(MessageSource::Assistant, Block::Text(Text { text: text.into() }))
}

fn request(messages: Vec<ChatMessage>) -> Arc<Request> {
    Arc::new(Request {
        messages,
        ..Request::from_command(&command("x")).expect("the command is whole")
    })
}

/// The text of the answer, with each script after a `>`.
async fn play(scripted: &Scripted, request: &Arc<Request>) -> Result<String, Failure> {
    let mut answer = Answer::new(request);
    let mut chunks = scripted.invoke(Arc::clone(request));
    while let Some(chunk) = chunks.try_next().await? {
        answer.push(chunk)?;
    }
    let blocks = answer.complete().blocks;
    Ok(blocks
        .into_iter()
        .map(|block| match block.block {
            Some(Block::Text(text)) => text.text,
            Some(Block::CodeInterpreterCall(call)) => format!(">{}", call.code),
            other => panic!("not in an answer: {other:?}"),
        })
        .collect())
}

#[tokio::test]
async fn transcript_selects_the_turn() {
    let scripted =
        scripted(r#"[{"text": "first", "code": "a\"\n"}, {"code": ["b", "c"]}, {"text": "last"}]"#);
    let mut messages = vec![user("go")];
    for expected in ["first>a\"\n", ">b>c", "last", "You said: go"] {
        let request = request(messages.clone());
        for _ in 0..2 {
            assert_eq!(
                play(&scripted, &request).await.as_deref(),
                Ok(expected),
                "also when it is delivered again"
            );
        }
        messages.push(assistant(expected));
    }
}

#[tokio::test]
async fn texts_and_scripts_may_be_lists_of_lines() {
    let scripted = scripted(r#"[{"text": ["a", "b"], "code": [["c", "d"], "e"]}]"#);
    assert_eq!(play(&scripted, &request(vec![user("go")])).await.as_deref(), Ok("a\nb>c\nd>e"));
}

#[tokio::test]
async fn last_user_message_selects_the_conversation() {
    let scripted = scripted(
        r#"{"turns": [{"text": "other"}],
            "conversations": [{"match": "weather", "title": "Sun", "turns": [{"text": "sunny"}, {"text": "still sunny"}]}]}"#,
    );
    let mut messages = vec![user("hello"), assistant("other"), user("the weather?")];
    assert_eq!(play(&scripted, &request(messages.clone())).await.as_deref(), Ok("sunny"));
    messages.push(assistant("sunny"));
    assert_eq!(play(&scripted, &request(messages.clone())).await.as_deref(), Ok("still sunny"));
    messages.extend([assistant("still sunny"), user("weather again?")]);
    assert_eq!(play(&scripted, &request(messages)).await.as_deref(), Ok("sunny"));
}

#[tokio::test]
async fn title_comes_from_the_script_or_the_first_words() {
    let title =
        |messages| Arc::new(Request { purpose: Purpose::Title, ..(*request(messages)).clone() });
    let state =
        title(vec![user("Please count  the lines\nof every file in here"), assistant("ok")]);
    assert_eq!(
        play(&scripted("[]"), &state).await.as_deref(),
        Ok("Please count the lines of every")
    );
    assert_eq!(play(&scripted(r#"{"title": "Lines"}"#), &state).await.as_deref(), Ok("Lines"));
    let quoted = title(vec![user("user: what is one and one?\n\nassistant: two")]);
    assert_eq!(play(&scripted(""), &quoted).await.as_deref(), Ok("what is one and one?"));
    assert_eq!(play(&scripted(""), &title(vec![])).await.as_deref(), Ok("Untitled"));
}

#[tokio::test]
async fn summary_comes_from_the_script_and_may_fail() {
    let summary = |messages| {
        Arc::new(Request { purpose: Purpose::Compaction, ..(*request(messages)).clone() })
    };
    let state = summary(vec![user("user: It rains.\n\nassistant: It does.")]);
    assert_eq!(
        play(&scripted("[]"), &state).await.as_deref(),
        Ok("# Goal\n# Facts\nThey said 36 characters.\n# Done\n# Open\n")
    );
    let rain = scripted(
        r#"{"summary": {"text": "They talked."}, "conversations": [
            {"match": "rains", "summary": {"text": "Rain.", "fault": {"class": "content_refused", "times": 1}}}]}"#,
    );
    assert!(play(&rain, &state).await.is_err());
    assert_eq!(play(&rain, &state).await.as_deref(), Ok("Rain."));
    assert_eq!(
        play(&rain, &summary(vec![user("user: Sun.")])).await.as_deref(),
        Ok("They talked.")
    );
}

#[tokio::test]
async fn texts_may_use_variables() {
    let result =
        CodeInterpreterResult { output: "42\n".into(), ..CodeInterpreterResult::default() };
    let call = CodeInterpreterCall { id: "a".into(), code: "1".into() };
    let messages = vec![
        user("how many?"),
        message(MessageSource::Assistant, Block::CodeInterpreterCall(call)),
        message(MessageSource::System, Block::CodeInterpreterResult(result)),
    ];
    let scripted = scripted(
        r#"[{}, {"text": "{{last_user_text}} {{last_result}}", "code": "print({{json last_result}})"}]"#,
    );
    assert_eq!(
        play(&scripted, &request(messages)).await.as_deref(),
        Ok("how many? 42>print(\"42\")")
    );
}

#[tokio::test]
async fn user_text_is_not_expanded_as_template() {
    let echoed = play(&scripted(""), &request(vec![user("{{model}}")])).await;
    assert_eq!(echoed.as_deref(), Ok("You said: { {model}}"));
}

#[tokio::test(start_paused = true)]
async fn delays_and_pacing_are_applied() {
    let scripted = scripted(
        r#"{"tokens_per_second": 10, "turns": [{"delay_ms": 500, "text": "12345678", "code": "1234"}]}"#,
    );
    let begun = Instant::now();
    let request = request(vec![user("go")]);
    let mut times = Vec::new();
    let mut chunks = scripted.invoke(request);
    while let Some(chunk) = chunks.try_next().await.expect("no fault") {
        if matches!(chunk, Chunk::Text(_) | Chunk::Stop(_)) {
            times.push(begun.elapsed().as_millis());
        }
    }
    assert_eq!(times, [500, 600, 800]);
}

#[tokio::test]
async fn fault_fails_its_number_of_times_for_each_task() {
    let scripted = scripted(
        r#"[{"text": "fine", "fault": {"class": "rate_limited", "http_status": 429, "times": 2, "retry_after_ms": 5000}}]"#,
    );
    let first = request(vec![user("go")]);
    let second = Arc::new(Request { task_id: "another".into(), ..(*first).clone() });
    for request in [first, second] {
        for _ in 0..2 {
            let failure = play(&scripted, &request).await.expect_err("the fault strikes");
            assert_eq!((failure.class, failure.http_status), (FailureClass::RateLimited, 429));
            assert!(failure.retry_at.is_some());
        }
        assert_eq!(play(&scripted, &request).await.as_deref(), Ok("fine"));
    }
}

#[tokio::test]
async fn fault_may_occur_within_text_or_code() {
    for (after, expected) in
        [(0, ""), (3, "abc"), (6, "abcdef"), (8, "abcdefgh"), (99, "abcdefghi")]
    {
        let scripted = scripted(&format!(
            r#"[{{"text": "abcdef", "code": "ghi", "fault": {{"class": "transient", "times": 0, "after_chars": {after}}}}}]"#
        ));
        let request = request(vec![user("go")]);
        let mut answer = Answer::new(&request);
        let mut seen = String::new();
        let mut chunks = scripted.invoke(Arc::clone(&request));
        let failure = loop {
            match chunks.try_next().await {
                Ok(Some(chunk)) => {
                    seen.extend(answer.push(chunk).expect("in bounds").map(|visible| visible.text))
                }
                Ok(None) => panic!("the fault did not strike after {after}"),
                Err(failure) => break failure,
            }
        };
        assert_eq!(
            (failure.class, seen.as_str()),
            (FailureClass::Transient, expected),
            "after {after}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn stall_delays_and_continues() {
    let scripted =
        scripted(r#"[{"text": "abcdef", "fault": {"stall_ms": 60000, "after_chars": 2}}]"#);
    let begun = Instant::now();
    assert_eq!(play(&scripted, &request(vec![user("go")])).await.as_deref(), Ok("abcdef"));
    assert_eq!(begun.elapsed().as_secs(), 60);
}

#[test]
fn unreadable_script_names_the_position() {
    for script in ["{", "[{\"txt\": \"typo\"}]", "{\"turns\": [{\"code\": 1}]}", "7"] {
        let failure = Scripted::parse(script, String::new(), Arc::default()).err().expect(script);
        assert_eq!(failure.class, FailureClass::Configuration);
        assert!(failure.message.contains("line 1"), "{}", failure.message);
    }
}

#[tokio::test(start_paused = true)]
async fn demo_script_plays_to_its_end() {
    let scripted = scripted(include_str!("../../../../scripts/demo/script.json"));
    let mut messages = vec![user("report")];
    let begun = Instant::now();
    for turn in 0..4 {
        let answer =
            play(&scripted, &request(messages.clone())).await.expect("the demo injects no fault");
        assert_eq!(answer.contains("print("), turn < 3, "all turns but the last run a script");
        messages.push(assistant(&answer));
    }
    assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
}
