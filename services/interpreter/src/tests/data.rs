//! Scripts that process the data of a workspace process all of it.

use super::*;
use crate::sandbox::Status;

async fn value(bench: &Bench, script: &str) -> String {
    let outcome = bench.run(script).await;
    match &outcome.status {
        Status::Completed { value } => value.display().into_owned(),
        other => panic!("{script}\n{other:?}\n{}", outcome.output),
    }
}

#[tokio::test]
async fn rewritten_file_keeps_every_line() {
    let bench = Bench::with_files();
    let lines: String = std::iter::once("id,v\n".to_owned())
        .chain((0..100_000).map(|n| format!("{n},1\n")))
        .collect();
    std::fs::write(bench.work("over.csv"), &lines).expect("written");
    let script = "const rows = read_file('over.csv').trim().split('\\n').slice(1);
        create_file('over.csv', read_file('over.csv').replaceAll(',1\\n', ',2\\n'));
        [rows.length, rows.reduce((sum, row) => sum + Number(row.split(',')[1]), 0)]";
    assert_eq!(value(&bench, script).await, "[100000,100000]");
    let written = std::fs::read_to_string(bench.work("over.csv")).expect("readable");
    assert!(written == lines.replace(",1\n", ",2\n"));

    let numbers: Vec<usize> = (0..150_000).collect();
    std::fs::write(bench.work("numbers.json"), serde_json::json!(numbers).to_string())
        .expect("written");
    let script = "JSON.parse(read_file('numbers.json')).reduce((sum, n) => sum + n, 0)";
    assert_eq!(value(&bench, script).await, (149_999_usize * 150_000 / 2).to_string());
}

#[tokio::test]
async fn large_file_is_read_in_pieces_as_the_error_says() {
    let bench = Bench::with_files();
    let text = "\u{e4}\u{1f600}\"\n".repeat(800_000);
    std::fs::write(bench.work("big"), &text).expect("written");
    let script = "let limit;
        try { read_file('big') } catch (error) { if (error.name !== 'FileTooLarge') throw error; limit = error.details.piece }
        let [size, lines] = [0, 0];
        for (let offset = 0, piece; (piece = read_file('big', { offset, limit })) !== ''; offset += limit) {
            size += new TextEncoder().encode(piece).length;
            lines += piece.split('\\n').length - 1;
        }
        [size, lines]";
    assert_eq!(value(&bench, script).await, format!("[{},800000]", text.len()));
}

#[tokio::test]
async fn file_in_another_encoding_is_edited_without_damage() {
    let bench = Bench::with_files();
    std::fs::write(bench.work("latin"), b"caf\xe9 = 1\n").expect("written");
    let script = "let name = 'none';
        try { create_file('latin', read_file('latin').replace('1', '2')) } catch (error) { name = error.name }
        const text = read_file('latin', { encoding: 'latin1' });
        create_file('latin', text.replace('1', '2'), { encoding: 'latin1' });
        [name, text]";
    assert_eq!(value(&bench, script).await, "[\"WrongEncoding\",\"caf\u{e9} = 1\\n\"]");
    assert_eq!(std::fs::read(bench.work("latin")).expect("readable"), b"caf\xe9 = 2\n");
}
