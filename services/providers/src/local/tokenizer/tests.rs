use serde_json::json;

use super::*;

/// A tokenizer with these tokens, in the format of `tokenizer.json`.
pub(in crate::local) fn file(vocab: &[&str], lowercase: bool) -> Value {
    let vocab: serde_json::Map<String, Value> =
        vocab.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    json!({
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
            "lowercase": lowercase},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab},
    })
}

#[derive(Deserialize)]
struct RecordedRuns {
    vocab: Vec<String>,
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    lowercase: bool,
    cases: Vec<(String, Vec<usize>)>,
}

#[test]
fn texts_are_tokenized_as_by_the_reference() {
    let recorded: RecordedRuns =
        serde_json::from_str(include_str!("recorded.json")).expect("the recording");
    let vocab: Vec<&str> = recorded.vocab.iter().map(String::as_str).collect();
    for Run { lowercase, cases } in recorded.runs {
        let tokenizer =
            Tokenizer::parse(file(&vocab, lowercase).to_string().as_bytes()).expect("a tokenizer");
        assert_eq!(tokenizer.len(), vocab.len());
        for (text, expected) in cases {
            let mut tokens = Vec::new();
            tokenizer.for_each_token(&text, |token| tokens.push(token));
            assert_eq!(tokens, expected, "{text:?}, lowercase: {lowercase}");
        }
    }
}

#[test]
fn unsupported_component_is_rejected_by_name() {
    for (part, kind, words) in [
        ("model", "Unigram", "its model is `Unigram`"),
        ("pre_tokenizer", "Metaspace", "its pre-tokenizer is `Metaspace`"),
        ("normalizer", "NFKC", "its normalizer is `NFKC`"),
    ] {
        let mut file = file(&["a"], true);
        file[part]["type"] = json!(kind);
        let refused = Tokenizer::parse(file.to_string().as_bytes()).err().expect("it is refused");
        assert!(refused.to_string().starts_with(words), "{refused}");
    }
    let mut none = file(&["a"], true);
    none["normalizer"] = Value::Null;
    assert!(matches!(Tokenizer::parse(none.to_string().as_bytes()), Err(Error::Unknown { .. })));
    assert!(matches!(Tokenizer::parse(file(&[], true).to_string().as_bytes()), Err(Error::Empty)));
    assert!(matches!(Tokenizer::parse(b"{"), Err(Error::Json(_))));
}
