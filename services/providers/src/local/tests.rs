use std::{collections::HashMap, time::Duration};

use construct_proto::{
    mesh::v1::{FailureClass, Provider},
    v1::ModelProviderType,
};
use futures::TryStreamExt as _;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

use super::{tokenizer::tests::file, *};
use crate::vendor::{VendorFactory as _, Vendors};

const VOCAB: [&str; 5] = ["[PAD]", "[UNK]", "cat", "dog", "##s"];

/// Writes a model with two numbers per token, in the format of Model2Vec.
fn write(folder: &Path, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)], config: Option<&str>) {
    fs::create_dir_all(folder).expect("a folder");
    fs::write(folder.join("tokenizer.json"), file(&VOCAB, true).to_string())
        .expect("it is written");
    let views: HashMap<&str, TensorView<'_>> = tensors
        .iter()
        .map(|(name, kind, shape, data)| {
            (*name, TensorView::new(*kind, shape.clone(), data).expect("a tensor"))
        })
        .collect();
    fs::write(folder.join(WEIGHTS_FILE), safetensors::serialize(views, None).expect("tensors"))
        .expect("it is written");
    if let Some(config) = config {
        fs::write(folder.join("config.json"), config).expect("it is written");
    }
}

fn bytes<const N: usize, T>(numbers: &[T], write: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    numbers.iter().flat_map(write).collect()
}

/// Zeros for padding and unknown tokens; a cat points right, a dog up, and the plural suffix a bit
/// further right.
fn embeddings() -> (&'static str, Dtype, Vec<usize>, Vec<u8>) {
    let numbers = [0.0_f32, 0.0, 9.0, 9.0, 3.0, 0.0, 0.0, 4.0, 1.0, 0.0];
    ("embeddings", Dtype::F32, vec![5, 2], bytes(&numbers, |number| number.to_le_bytes()))
}

fn vendor(models: &LocalModels) -> Box<dyn Vendor> {
    let vendors =
        Vendors { local: models.clone(), ..crate::tests::vendors(Duration::from_secs(10)) };
    let provider = Provider { r#type: ModelProviderType::Local.into(), ..Provider::default() };
    vendors.open(&provider, None, None).expect("it needs nothing")
}

async fn embed(
    models: &LocalModels,
    model: &str,
    texts: &[&str],
    dimensions: Option<u32>,
) -> Result<(Vec<Vec<f32>>, i64), Failure> {
    let texts = texts.iter().map(|text| (*text).to_owned()).collect();
    let request = Request {
        model: model.to_owned(),
        embed: Some(EmbedRequest { texts, dimensions }),
        ..crate::answer::tests::request()
    };
    let chunks: Vec<Chunk> = vendor(models).embed(Arc::new(request)).try_collect().await?;
    let (mut vectors, mut read) = (Vec::new(), 0);
    for chunk in chunks {
        match chunk {
            Chunk::Vector(vector) => vectors.push(vector),
            Chunk::Usage(usage) => read = usage.input_tokens,
            other => panic!("{other:?}"),
        }
    }
    Ok((vectors, read))
}

#[tokio::test]
async fn text_vector_is_the_mean_of_its_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let plain = Some(r#"{"normalize": false}"#);
    write(&folder.path().join("one"), &[embeddings()], None);
    write(&folder.path().join("team/plain"), &[embeddings()], plain);
    let models = LocalModels::new(Some(folder.path().to_owned()));
    let texts = ["Cat dog", "cats, cats!", "birds", ""];
    let (vectors, read) = embed(&models, "team/plain", &texts, None).await.expect("vectors");
    // Unknown words are ignored.
    assert_eq!(vectors, [[1.5, 2.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]]);
    assert_eq!(read, 2 + 4);
    let (vectors, _) = embed(&models, "one", &texts, None).await.expect("vectors");
    assert_eq!(
        vectors,
        [[0.6, 0.8], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        "one long unless the model says otherwise"
    );
    let (vectors, _) = embed(&models, "one", &["cat dog"], Some(1)).await.expect("vectors");
    assert_eq!(vectors, [[1.0]], "shorter vectors are one long, too");
    let (vectors, _) = embed(&models, "one", &["dog"], Some(7)).await.expect("vectors");
    assert_eq!(vectors, [[0.0, 1.0]], "there are no more numbers than there are");
    let names: Vec<String> = vendor(&models)
        .models()
        .await
        .expect("a list")
        .into_iter()
        .map(|model| model.name)
        .collect();
    assert_eq!(names, ["one", "team/plain"]);
}

#[tokio::test]
async fn weights_shared_rows_and_small_numbers_are_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let plain = Some(r#"{"normalize": false}"#);
    let weights = (
        "weights",
        Dtype::F64,
        vec![5],
        bytes(&[1.0_f64, 1.0, 2.0, 0.5, 1.0], |number| number.to_le_bytes()),
    );
    write(&folder.path().join("weighted"), &[embeddings(), weights], plain);
    let mapping = (
        "mapping",
        Dtype::I64,
        vec![5],
        bytes(&[0_i64, 0, 1, 1, 0], |number| number.to_le_bytes()),
    );
    let rows = ("embeddings", Dtype::I8, vec![2, 2], vec![0, 0, 5, 0xfb]);
    write(&folder.path().join("mapped"), &[rows, mapping], plain);
    let halves = [0_u16, 0, 0, 0, 0x3c00, 0xc000, 0, 0, 0, 0];
    let halves =
        ("embedding.weight", Dtype::F16, vec![5, 2], bytes(&halves, |number| number.to_le_bytes()));
    write(&folder.path().join("halves"), &[halves], plain);
    let models = LocalModels::new(Some(folder.path().to_owned()));
    for (model, text, vector) in [
        ("weighted", "cat dog", [3.0, 1.0]),
        ("mapped", "cat dog", [5.0, -5.0]),
        ("halves", "cat", [1.0, -2.0]),
    ] {
        let (vectors, _) = embed(&models, model, &[text], None)
            .await
            .unwrap_or_else(|failure| panic!("{model}: {failure}"));
        assert_eq!(vectors, [vector], "{model}");
    }
}

#[tokio::test]
async fn changed_model_file_is_reloaded() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("one");
    write(&place, &[embeddings()], None);
    let models = LocalModels::new(Some(folder.path().to_owned()));
    assert_eq!(embed(&models, "one", &["cat"], None).await.expect("vectors").0, [[1.0, 0.0]]);
    let turned = ("embeddings", Dtype::I8, vec![5, 2], vec![0, 0, 0, 0, 0, 7, 0, 0, 0, 0]);
    write(&place, &[turned], None);
    // File system clocks may have a resolution of some milliseconds.
    let written =
        fs::metadata(place.join(WEIGHTS_FILE)).and_then(|file| file.modified()).expect("a time");
    let later = written + Duration::from_secs(10);
    fs::File::options()
        .append(true)
        .open(place.join(WEIGHTS_FILE))
        .and_then(|file| file.set_modified(later))
        .expect("set");
    assert_eq!(embed(&models, "one", &["cat"], None).await.expect("vectors").0, [[0.0, 1.0]]);
}

#[tokio::test]
async fn invalid_model_is_rejected_with_a_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("models");
    write(&folder.path().join("outside"), &[embeddings()], None);
    let few = ("embeddings", Dtype::F32, vec![2, 1], vec![0; 8]);
    write(&root.join("few"), &[few], None);
    let flat = ("embeddings", Dtype::F32, vec![10], vec![0; 40]);
    write(&root.join("flat"), &[flat], None);
    let far = (
        "mapping",
        Dtype::I32,
        vec![5],
        bytes(&[0_i32, 1, 2, 3, 9], |number| number.to_le_bytes()),
    );
    write(&root.join("far"), &[embeddings(), far], None);
    write(&root.join("broken"), &[embeddings()], None);
    fs::write(root.join("broken").join(WEIGHTS_FILE), b"nonsense").expect("it is written");
    write(&root.join("other"), &[embeddings()], None);
    fs::write(root.join("other/tokenizer.json"), json!({"model": {"type": "BPE"}}).to_string())
        .expect("it is written");
    let models = LocalModels::new(Some(root.clone()));
    for (model, words) in [
        ("few", "has 2 vectors for 5 tokens"),
        ("flat", "not of two dimensions"),
        ("far", "maps a token to vector 9 of 5"),
        ("broken", "cannot be read"),
        ("other", "only `BertPreTokenizer` is known"),
    ] {
        let failure = embed(&models, model, &["cat"], None).await.expect_err(model);
        assert_eq!(failure.class, FailureClass::Configuration, "{failure}");
        assert!(failure.message.contains(words), "{model}: {failure}");
    }
    for model in
        ["none", "../outside", "/etc", "few/../../outside", ".", "", "a/b/c", "few/", "..\\outside"]
    {
        let failure = embed(&models, model, &["cat"], None).await.expect_err(model);
        assert!(failure.is_model_missing(), "{model}: {failure}");
    }
    let failure =
        embed(&LocalModels::new(None), "one", &["cat"], None).await.expect_err("no folder");
    assert!(failure.message.contains("CONSTRUCT_PROVIDERS_MODELS_DIR"), "{failure}");
    let answer = vendor(&models).invoke(Arc::new(crate::answer::tests::request()));
    let failure = answer.try_collect::<Vec<_>>().await.expect_err("it gives no answers");
    assert_eq!(failure.class, FailureClass::InvalidRequest);
}
